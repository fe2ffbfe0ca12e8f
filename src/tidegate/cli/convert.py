"""``tidegate convert``: turn a checkpoint into an expert store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from tidegate.checkpoint.convert import ConvertOptions, convert
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.progress import converting
from tidegate.config import DENSE_KINDS, EXPERT_KINDS
from tidegate.units import format_bytes, format_seconds


def command(
    src: Annotated[str, Argument(help="A Hugging Face folder or a GGUF file.")],
    dst: Annotated[Path, Argument(help="The folder to make.")],
    experts: Annotated[
        str,
        Flag(metavar="|".join(EXPERT_KINDS), help="Format of routed experts. auto: the source's own, or int4."),
    ] = "auto",
    dense: Annotated[
        str, Flag(metavar="|".join(DENSE_KINDS), help="Format of the rest. auto: the source's own, or int8.")
    ] = "auto",
    group: Annotated[
        int | None, Flag(metavar="32|64|128", help="Inputs that share a scale in int4 and int8 (default: 32).")
    ] = None,
    overwrite: Annotated[bool, Flag("--overwrite", help="Replace a store that is there already.")] = False,
) -> int:
    """Interrupted or killed, the same command goes on where it was. Routers, norms and biases stay float32."""
    options = ConvertOptions(experts, dense, group)
    started_s = time.monotonic()
    with converting(src, f"{dst}.partial") as progress:
        convert(src, dst, options, overwrite=overwrite, progress=progress)
    print(_summary(dst, ExpertStore.open(dst).manifest, time.monotonic() - started_s))
    return 0


def _summary(dst: Path, manifest: Manifest, elapsed_s: float) -> str:
    total_bytes = manifest.dense_bytes + manifest.expert_bytes
    dense = sorted({str(entry.fmt) for entry in manifest.dense if entry.fmt})
    experts = sorted({str(fmt) for layer in manifest.layers for fmt in (layer.layout.fmt, layer.layout.down_fmt)})
    parts = [f"{format_bytes(manifest.dense_bytes)} dense ({', '.join(dense)})"]
    if experts:
        parts.append(f"{format_bytes(manifest.expert_bytes)} experts ({', '.join(experts)})")
    speed = format_bytes(int(total_bytes / max(elapsed_s, 1e-3)))
    return f"{dst}: {' + '.join(parts)} written in {format_seconds(elapsed_s)} ({speed}/s)"
