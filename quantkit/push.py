"""Upload of a finished folder to the Hugging Face hub; checked first, and resumable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UserError
from quantkit.verify import verify

# Above this many bytes the hub's own resumable uploader is used, which commits file by file.
LARGE = 2_000_000_000
LEFT_OUT = (".cache", ".git", "__pycache__")


@dataclass(frozen=True, slots=True)
class Sent:
    """files: name -> bytes. url: of the repository, "" for a dry run."""

    files: dict[str, int]
    url: str


def push(folder: Path, repo: str, *, dry_run: bool = False, private: bool = False, api: Any = None) -> Sent:
    """Verify ``folder`` and upload it to ``repo`` (owner/name). With ``dry_run`` nothing is sent.

    api: a ``huggingface_hub.HfApi``, made when absent. An upload that broke off is resumed by the same call.
    Raises UserError when the folder does not verify or the hub refuses.
    """
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise UserError(f"{repo!r} is no repository; write owner/name")
    findings = [f for f in verify(folder).findings if f.severe]
    if findings:
        raise UserError(
            f"{folder} is not fit to be published: {findings[0].message} ({len(findings)} findings; "
            f"`quantkit verify {folder}`)"
        )
    files = files_of(folder)
    if dry_run:
        return Sent(files, "")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    api = api or huggingface_hub.HfApi()
    ignore = [f"{name}/**" for name in LEFT_OUT]
    try:
        made = api.create_repo(repo_id=repo, private=private, repo_type="model", exist_ok=True)
        if sum(files.values()) > LARGE:
            api.upload_large_folder(
                repo_id=repo, folder_path=folder, repo_type="model", private=private, ignore_patterns=ignore
            )
        else:
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                repo_type="model",
                ignore_patterns=ignore,
                commit_message=f"Upload {folder.name} with quantkit",
            )
    except (HfHubHTTPError, OSError) as e:
        raise UserError(
            f"the hub did not take {repo}: {e}; log in with `hf auth login`, or give the command again to "
            "resume"
        ) from e
    return Sent(files, str(getattr(made, "url", made)))


def files_of(folder: Path) -> dict[str, int]:
    """Relative name and size of every file that would be sent."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {
        str(n): p.stat().st_size for p in found if not set((n := p.relative_to(folder)).parts) & set(LEFT_OUT)
    }
