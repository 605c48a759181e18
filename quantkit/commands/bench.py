"""quantkit bench"""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("bench")
@click.argument("models", nargs=-1, metavar="[MODEL[,engine=E][,kv=F][,label=L]... | kernels]")
@click.option(
    "--contexts", default="128,2k", show_default=True, help="Prompt lengths, after which decoding is timed."
)
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Models take turns in each."
)
@click.option("--url", help="Measure a server instead (OpenAI-compatible, streaming).")
@click.option("--concurrency", default="1,4,8", show_default=True, help="With --url: requests at a time.")
@click.option(
    "--requests", type=click.IntRange(1), default=16, show_default=True, help="With --url: per concurrency."
)
@click.option("--prompt", default="Write a short story about a lighthouse.", help="With --url.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Append the rows to this JSON-lines file."
)
def command(
    models: tuple[str, ...], contexts: str, new_tokens: int, rounds: int, url: str | None, concurrency: str,
    requests: int, prompt: str, json_file: Path | None,
) -> None:  # fmt: skip
    """Time MODELs side by side, each in its own process, in turns; or the kernels alone; or a server (--url)."""
    if models == ("kernels",):
        from quantkit import bench_kernels

        for row in bench_kernels.run():
            click.echo(json.dumps(row))
        return
    rows = (
        _server(url, concurrency, requests, prompt, new_tokens)
        if url
        else _models(models, contexts, new_tokens, rounds)
    )
    if json_file:
        from quantkit.evals import provenance

        about = provenance(seed=0)
        with json_file.open("a", encoding="utf-8") as f:
            f.writelines(json.dumps({**row, **about}, ensure_ascii=False) + "\n" for row in rows)


def _server(url: str, concurrency: str, requests: int, prompt: str, new_tokens: int) -> list[dict]:
    from quantkit.decode.http_bench import run
    from quantkit.sizes import parse_count

    rows = []
    for n in [parse_count(c) for c in concurrency.split(",")]:
        # a number in front, so that a server's prefix cache does not answer for it
        load = run(url, n, [f"{i}. {prompt}" for i in range(requests)], new_tokens)
        rows += load.rows()
        shown = {r["metric"]: r["value"] for r in load.rows()}
        words = [f"{k} {v:.4g}" for k, v in shown.items()]
        click.echo(f"concurrency {n}: " + ", ".join(words))
        for lost in load.lost[:3]:
            click.echo(f"  lost: {lost.error}", err=True)
    return rows


def _models(models: tuple[str, ...], contexts: str, new_tokens: int, rounds: int) -> list[dict]:
    from rich.console import Console
    from rich.table import Table

    from quantkit.bench import Subject, bench
    from quantkit.doctor import best_bandwidth
    from quantkit.errors import UserError
    from quantkit.sizes import parse_count, show_size

    if not models:
        raise UserError("nothing to measure; give model folders, `kernels`, or --url")
    subjects = [Subject.parse(m) for m in models]
    lengths = [parse_count(c) for c in contexts.split(",")]
    bandwidth, how = best_bandwidth()
    rows = bench(subjects, bandwidth, lengths, new_tokens, rounds)
    table = Table(
        title=f"read bandwidth measured first: {bandwidth / 1e9:.1f} GB/s ({how})", title_justify="left"
    )
    heads = (
        "model",
        "engine",
        "context",
        "TTFT ms",
        "ITL p50 / p90 / p99 ms",
        "tok/s",
        "bytes/token",
        "of limit",
        "peak memory",
    )
    for head in heads:
        table.add_column(head, overflow="fold")
    for subject in subjects:
        own = [r for r in rows if r["model"] == subject.label]
        peak = next(r["value"] for r in own if r["metric"] == "peak_rss")
        for length in lengths:
            v = {r["metric"]: r["value"] for r in own if r.get("context") == length}
            table.add_row(
                subject.label, own[0]["engine"], str(length), f"{v['ttft_median']:.1f}",
                f"{v['itl_p50']:.2f} / {v['itl_p90']:.2f} / {v['itl_p99']:.2f}", f"{v['decode_rate']:.1f}",
                show_size(v["bytes_per_token"]), f"{v['bandwidth_share']:.0%}", show_size(peak),
            )  # fmt: skip
        for note in own[0]["notes"]:
            click.echo(f"note: {subject.label}: {note}", err=True)
    Console().print(table)
    return rows
