"""Calibration data: a source of text → exact windows of token ids, plus an audit of what was really used.

    data = load_calibration("default", tokenizer, samples=128, seq_len=512, seed=0)
    data.ids        # int64 [windows, seq_len]
    data.audit      # rows in, used and dropped, tokens, BOS, separator, template, hash

What happens to the text, in order (every step is recorded in the audit):

1. rows are read from the source; empty rows and exact duplicates are dropped;
2. chat rows go through the tokenizer's own chat template;
3. texts above 16,384 characters are cut at blank lines, so that a book does not fill every window;
4. passages are shuffled by a private generator, kinds interleaved, so that every kind appears early;
5. they are tokenized as the tokenizer does by default, and separated by its document separator;
6. the stream is cut into windows of exactly ``seq_len`` tokens. Where the tokenizer adds a BOS token, every
   window begins with it, because that is what the model sees at position 0 in use.

Text is never repeated to fill a quota: too little text gives fewer windows, and the audit says so.
"""

from __future__ import annotations

from quantkit.calib.audit import Audit
from quantkit.calib.load import CalibOptions, Calibration, load_calibration
from quantkit.calib.selfsample import sampler_for
from quantkit.calib.sources import default_folder

__all__ = ["Audit", "CalibOptions", "Calibration", "default_folder", "load_calibration", "sampler_for"]
