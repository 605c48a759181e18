"""quantkit push"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("push")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--dry-run", is_flag=True, help="Verify, and list what would be sent.")
@click.option("--private", is_flag=True, help="Make a private repository.")
def command(folder: Path, repo: str, dry_run: bool, private: bool) -> None:
    """Verify FOLDER and upload it to REPO (owner/name) on the Hugging Face hub. A broken upload is
    resumed."""
    from quantkit.push import push
    from quantkit.sizes import show_size

    sent = push(folder, repo, dry_run=dry_run, private=private)
    for name, size in sent.files.items():
        click.echo(f"{show_size(size):>10}  {name}")
    total = show_size(sum(sent.files.values()))
    click.echo(
        f"{len(sent.files)} files, {total} would go to {repo}"
        if dry_run
        else f"{len(sent.files)} files, {total}: {sent.url}"
    )
