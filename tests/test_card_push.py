"""The model card and the upload, without a network."""

import json

import pytest
import yaml
from click.testing import CliRunner

from quantkit.cli import cli
from quantkit.errors import UserError
from quantkit.model_card import read_rows, write_card
from quantkit.push import push
from quantkit.quantize import quantize
from quantkit.recipe import Recipe, Rule, WeightFormat
from quantkit.verify import verify


@pytest.fixture
def folder(twin_folder, tmp_path):
    recipe = Recipe(name="mine", rules=(Rule(weights=WeightFormat(group=32, symmetric=False), solver="rtn"),))
    return quantize(str(twin_folder("llama")), tmp_path / "model-w4", recipe).folder


def test_card_says_what_it_is_and_how_to_make_it_again(folder, tmp_path):
    text = (folder / "README.md").read_text()
    head, body = text.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert "recipe `mine`" in body and "| down_proj | 3 | 30,720 | W4A16 g32 asym |" in body
    assert "vllm serve" in body and "**transformers** does not load it" in body  # packed zero points
    assert "quantkit quantize" in body and str(tmp_path) not in text
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert (
        Recipe.model_validate(recipe).digest()
        == json.loads((folder / "quantkit.json").read_text())["fingerprint"]["recipe"]
    )


def test_card_is_deterministic_and_refreshed_with_measured_rows(folder, tmp_path):
    before = (folder / "README.md").read_bytes()
    write_card(folder)
    assert (folder / "README.md").read_bytes() == before
    rows = tmp_path / "rows.jsonl"
    about = {"corpus": "heldout", "windows": 8, "tokens": 4088, "unit": ""}
    lines = [
        {"model": "model-w4", "metric": "kl", "value": 0.01234, "stderr": 0.0005, **about},
        {"model": "model-w4", "metric": "perplexity", "value": 17.25, "stderr": None, **about},
        {"model": "original", "metric": "perplexity", "value": 16.5, "stderr": 0.25, **about},
    ]
    rows.write_text("".join(json.dumps(r) + "\n" for r in lines))
    done = CliRunner().invoke(cli, ["card", str(folder), "--rows", str(rows)])
    assert done.exit_code == 0, done.output
    text = (folder / "README.md").read_text()
    assert (
        "| model-w4 | 17.2500 | 0.0123 ± 0.0005 |" in text and "| original | 16.5000 ± 0.2500 | – |" in text
    )
    assert "heldout, 8 windows, 4088 tokens" in text
    assert verify(folder).sound  # a refreshed card is no damage
    rows.write_text('{"value": 1}\n')
    with pytest.raises(UserError, match="line 1 is no measured row"):
        read_rows(rows)


def test_card_of_a_folder_without_manifest_is_refused(twin_folder):
    with pytest.raises(UserError, match=r"no quantkit\.json"):
        write_card(twin_folder("llama"))


class FakeApi:
    """Records what would be sent."""

    def __init__(self, fail=False):
        self.calls, self.fail = [], fail

    def create_repo(self, **options):
        self.calls.append(("create_repo", options))
        return "https://hub/owner/model"

    def upload_folder(self, **options):
        if self.fail:
            raise OSError("connection lost")
        self.calls.append(("upload_folder", options))

    def upload_large_folder(self, **options):
        self.calls.append(("upload_large_folder", options))


def test_push_sends_the_folder(folder, monkeypatch):
    api = FakeApi()
    sent = push(folder, "owner/model", private=True, api=api)
    assert [name for name, _ in api.calls] == ["create_repo", "upload_folder"] and sent.url.endswith(
        "owner/model"
    )
    assert api.calls[0][1]["private"] is True and api.calls[1][1]["folder_path"] == folder
    assert {"model.safetensors", "README.md", "quantkit.json", "tokenizer.json"} <= set(sent.files)
    monkeypatch.setattr("quantkit.push.LARGE", 10)
    push(folder, "owner/model", api=api)
    assert api.calls[-1][0] == "upload_large_folder"


def test_push_dry_run_and_refusals(folder):
    done = CliRunner().invoke(cli, ["push", str(folder), "owner/model", "--dry-run"])
    assert (
        done.exit_code == 0
        and "model.safetensors" in done.output
        and "would go to owner/model" in done.output
    )
    with pytest.raises(UserError, match="owner/name"):
        push(folder, "model", dry_run=True)
    with pytest.raises(UserError, match=r"connection lost.*resume"):
        push(folder, "owner/model", api=FakeApi(fail=True))
    (folder / "chat_template.jinja").unlink()
    api = FakeApi()
    with pytest.raises(UserError, match=r"not fit to be published: chat_template\.jinja"):
        push(folder, "owner/model", api=api)
    assert api.calls == []


def test_plan_for_a_runtime(twin_folder, capsys):
    run = CliRunner().invoke
    done = run(cli, ["plan", str(twin_folder("llama")), "--group-size", "32", "--for", "vllm"])
    assert done.exit_code == 0 and "nothing known stands against vllm" in done.output, done.output
    done = run(
        cli, ["plan", str(twin_folder("llama")), "--group-size", "32", "--for", "vllm", "--tp", "2", "--json"]
    )
    refused = json.loads(done.output)["refused"]
    assert done.exit_code == 1 and any("down_proj" in r and "2 ranks" in r for r in refused)


def test_quantize_warns_for_the_recipes_runtime(twin_folder):
    from quantkit.quantize import prepare
    from quantkit.recipe import ExportSpec

    recipe = Recipe(
        rules=(Rule(weights=WeightFormat(bits=3, group=32), solver="rtn"),), export=ExportSpec(runtime="vllm")
    )
    assert any("no kernel for W3A16" in w for w in prepare(str(twin_folder("llama")), recipe).plan.warnings)
