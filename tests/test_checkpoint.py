"""Reading and writing of safetensors folders, and every refusal of a damaged one."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint import (
    FolderWriter,
    Source,
    read_header,
    read_rows,
    read_tensor,
    same_bytes,
    write_file,
)
from quantkit.errors import UserError


def folder_with(tmp_path, tensors, config=None):
    (tmp_path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


SAMPLE = {
    "a.weight": torch.randn(5, 7),
    "b": torch.randn(3, 4).bfloat16(),
    "c": torch.randint(0, 255, (11,), dtype=torch.uint8),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4),
}


def test_reads_what_the_safetensors_library_wrote(tmp_path):
    source = Source(folder_with(tmp_path, SAMPLE))
    assert set(source.tensors) == set(SAMPLE)
    for name, want in SAMPLE.items():
        assert torch.equal(source.tensor(name), want), name
    rows = read_rows(source.tensors["a.weight"], torch.tensor([4, 0, 4]))
    assert torch.equal(rows, SAMPLE["a.weight"][[4, 0, 4]])


def test_the_safetensors_library_reads_what_we_write(tmp_path):
    write_file(tmp_path / "x.safetensors", SAMPLE, {"format": "pt"})
    back = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(back[n], t) for n, t in SAMPLE.items()) and set(back) == set(SAMPLE)
    # every tensor starts at a multiple of its item size
    infos, _ = read_header(tmp_path / "x.safetensors")
    assert all(i.offset % i.dtype.itemsize == 0 for i in infos.values())


@pytest.mark.parametrize("limit", [60, 10**9])
def test_streamed_writer_in_any_order_and_sharded(tmp_path, limit):
    layout = {n: (t.dtype, tuple(t.shape)) for n, t in SAMPLE.items()}
    writer = FolderWriter(tmp_path, layout, shard_limit=limit)
    for name in reversed(SAMPLE):
        writer.write(name, SAMPLE[name])
    writer.close()
    (tmp_path / "config.json").write_text("{}")
    source = Source(tmp_path)
    assert (len(source.files) > 1) == (limit == 60)
    assert all(torch.equal(source.tensor(n), t) for n, t in SAMPLE.items())


def test_writer_refuses_wrong_shape_repeat_and_omission(tmp_path):
    writer = FolderWriter(tmp_path, {"a": (torch.float32, (2, 2)), "b": (torch.float32, (1,))})
    with pytest.raises(ValueError, match="planned torch.float32"):
        writer.write("a", torch.zeros(2, 3))
    writer.write("a", torch.zeros(2, 2))
    with pytest.raises(ValueError, match="twice"):
        writer.write("a", torch.zeros(2, 2))
    with pytest.raises(ValueError, match="never written.*'b'"):
        writer.close()


def test_truncated_file_is_named_before_work(tmp_path):
    folder_with(tmp_path, SAMPLE)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(UserError, match=r"model.safetensors is truncated.*promises"):
        Source(tmp_path)
    file.write_bytes(data[:5])
    with pytest.raises(UserError, match="not a complete safetensors file"):
        Source(tmp_path)
    file.write_bytes(struct.pack("<Q", 10**12) + data[8:])
    with pytest.raises(UserError, match="does not fit in a file"):
        Source(tmp_path)


def test_index_that_names_absent_shards(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match=r"lacks 1 of 2 weight files.*model-00002"):
        Source(tmp_path)


def test_folder_without_config_or_weights(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        Source(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        Source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        Source(tmp_path)
    (tmp_path / "config.json").write_text("{oops")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="not valid JSON"):
        Source(tmp_path)


def test_pickles_are_refused_with_a_way_out(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(UserError, match=r"only pickle weights \(pytorch_model.bin\).*save_pretrained"):
        Source(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scan_names_the_tensor_with_nan(tmp_path, bad, dtype):
    weight = torch.randn(40, 50).to(dtype)
    weight[3, 4] = bad
    folder_with(tmp_path, {"fine": torch.randn(9), "layer.weight": weight})
    with pytest.raises(UserError, match=r"layer\.weight holds 1 NaN or infinite"):
        Source(tmp_path).scan()


def test_scan_accepts_large_finite_values_and_hashes_content(tmp_path):
    big = torch.full((3, 3), torch.finfo(torch.float32).max)
    one = Source(folder_with(tmp_path, {"w": big})).scan()
    big[0, 0] = 1
    other = tmp_path / "other"
    other.mkdir()
    assert Source(folder_with(other, {"w": big})).scan() != one
    shutil.rmtree(other)


def test_missing_tensor_is_named(tmp_path):
    with pytest.raises(UserError, match="has no tensor 'zzz'"):
        Source(folder_with(tmp_path, SAMPLE)).tensor("zzz")


def test_read_tensor_gives_private_memory(tmp_path):
    source = Source(folder_with(tmp_path, SAMPLE))
    first = read_tensor(source.tensors["a.weight"])
    first.zero_()
    assert torch.equal(source.tensor("a.weight"), SAMPLE["a.weight"])


def test_writer_as_context_copies_and_lets_go_of_files(tmp_path):
    source = Source(folder_with(tmp_path, SAMPLE))
    layout = {n: (i.dtype, i.shape) for n, i in source.tensors.items()}
    (tmp_path / "copy").mkdir()
    with FolderWriter(tmp_path / "copy", layout) as writer:
        for name, info in source.tensors.items():
            writer.copy(name, info)
    copied, _ = read_header(tmp_path / "copy" / "model.safetensors")
    assert all(same_bytes(copied[n], source.tensors[n]) for n in SAMPLE)
    assert not same_bytes(copied["a.weight"], source.tensors["b"])
    with pytest.raises(ValueError, match="never written"), FolderWriter(tmp_path / "copy", layout) as writer:
        writer.copy("b", source.tensors["b"])
    with pytest.raises(RuntimeError, match="mine"), FolderWriter(tmp_path / "copy", layout) as writer:
        raise RuntimeError("mine")  # not hidden by a complaint about what is missing
    with pytest.raises(ValueError, match="closed file"):
        writer.copy("b", source.tensors["b"])
    with pytest.raises(ValueError, match=r"a.weight: planned"):
        FolderWriter(tmp_path / "copy", layout).copy("a.weight", source.tensors["b"])
