"""quantkit doctor"""

from __future__ import annotations

import click


@click.command("doctor")
@click.option("--no-timing", is_flag=True, help="Leave out the bandwidth measurement.")
@click.pass_context
def command(ctx: click.Context, no_timing: bool) -> None:
    """Check this installation: versions, processor, native library, kernels against the oracle, bandwidth.

    Exit code 1 when a kernel gives wrong results.
    """
    import torch

    from quantkit.doctor import EXTRAS, best_bandwidth, check_kernels, packages, runtimes, runtimes_folder
    from quantkit.evals import _rows
    from quantkit.kernels import native

    for name, version in packages().items():
        hint = (
            f"not installed (pip install 'quantkit[{EXTRAS[name]}]')" if name in EXTRAS else "not installed"
        )
        click.echo(f"{name:<20} {version or hint}")
    click.echo(
        f"{'processor':<20} {_rows.processor()}, {_rows.available_cores()} cores, {torch.get_num_threads()} threads"
    )
    click.echo(f"{'accelerator':<20} {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}")
    reason = native.why_unavailable()
    click.echo(
        f"{'native library':<20} {reason or f'{native.isa()}, {native.library().qk_threads()} threads'}"
    )
    wrong = 0
    for check in check_kernels("cuda" if torch.cuda.is_available() else "cpu"):
        verdict = f"refuses: {check.refusal}" if check.error is None else f"error {check.error:.1e}"
        if not check.ok:
            wrong += 1
            verdict += "  WRONG"
        click.echo(f"{'kernel ' + check.backend:<20} {check.scheme!s:<18} {verdict}")
    if not no_timing:
        rate, how = best_bandwidth()
        click.echo(f"{'read bandwidth':<20} {rate / 1e9:.1f} GB/s ({how})")
    click.echo(f"{'runtimes':<20} {', '.join(runtimes()) or f'none in {runtimes_folder().name}/'}")
    if wrong:
        click.echo(
            f"{wrong} kernel checks failed; set QUANTKIT_ISA=generic and report this machine", err=True
        )
        ctx.exit(1)
