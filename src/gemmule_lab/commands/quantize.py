"""``gemmule quantize``: a model's folder as one with quantised weights, file by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gemmule.core.words import Method
from gemmule.quant import checks, files
from gemmule.quant.float4 import GROUP_SIZES
from gemmule_lab.commands import _options as options


@options.command("use", "Quantise a model's folder into another one.")
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@options.one("--bits", ("4", "8"), "4", "Of a weight.")
@options.one("--group-size", int, 64, "Columns that share a scale; -1 for a row.")
@options.one("--format", tuple(GROUP_SIZES), None, "Of 4-bit floats, in place of bits and group.")
@options.one("--method", ("rtn", "mse", "hqq"), None, "By default hqq, of a format mse.")
@click.option(
    "--keep", multiple=True, help="Name or pattern of layers that stay floats, as the head does."
)
def quantize(
    model: Path,
    out: Path,
    bits: str,
    group_size: int,
    format: str | None,  # noqa: A002  the option's name
    method: Method | None,
    keep: tuple[str, ...],
) -> dict[str, Any]:
    """Quantise the linear layers of MODEL, a folder of transformers, and write the result to OUT.

    The model is never in memory: one weight and one file of at most 1 GiB are. A run that was cut
    off goes on where it stopped when it is started again. OUT is loaded by from_pretrained after
    `import gemmule.torch`.
    """
    if out.resolve() == model.resolve():
        raise ValueError(
            f"OUT is {model} itself, whose floats it would replace; name another folder."
        )
    checks.group_size(group_size)
    files.check_floats(model)  # before what is below is loaded, for some seconds
    from gemmule.torch.folders import quantise_folder
    from gemmule.torch.pretrained import GemmuleConfig
    from gemmule_lab.progress import tracked

    kept = [*keep, "lm_head"] if keep else None
    config = GemmuleConfig(
        int(bits),
        group_size,
        method=method or ("mse" if format else "hqq"),
        number_format=format,
        modules_to_not_convert=kept,
    )
    count, weights = quantise_folder(model, out, config)
    done = [one.options is not None for one in tracked(weights, count, "quantising")]
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    click.echo(f"{sum(done)} of {count} tensors quantised; {size / 1e6:,.1f} MB in {out}")
    return {"folder": out, "tensors": count, "quantised": sum(done), "bytes": size}


COMMAND = quantize
