"""``tidegate trace``: record the routing of a model over texts, or turn recorded arrays into a trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.files import check_output, read_utf8
from tidegate.cli.options import flags
from tidegate.cli.progress import converting, counted
from tidegate.config import EngineOptions
from tidegate.errors import UsageError
from tidegate.units import format_bytes, parse_bytes


@flags({"Model and memory": EngineOptions}, without=("sequences",))
def command(
    model: Annotated[str, Argument(help="A model, as in tidegate run; or an .npz file of recorded arrays.")],
    output: Annotated[Path, Flag("--output", "-o", help="The trace to write.")],
    texts: Annotated[list[Path] | None, Argument(help="Text files; each is one category of the trace.")] = None,
    answer: Annotated[int, Flag(min=1, help="Tokens to generate after each piece of text.")] = 1,
    sketch: Annotated[
        int, Flag(min=0, max=4096, help="Also record this many numbers of what each router saw, for next-gate.")
    ] = 0,
    experts_in_layer: Annotated[
        int | None, Flag("--num-experts", min=1, help="Experts in a layer; only for an .npz file.")
    ] = None,
    expert_size: Annotated[
        str | None, Flag("--expert-bytes", metavar="BYTES", help="One expert's size; only for an .npz file.")
    ] = None,
    **options: Any,
) -> int:
    """Texts are read as they are, without a chat template, in pieces as long as the context, one piece of each in turn, so that
    the end of a trace, which scores predictors, has all kinds. An .npz file has experts
    [tokens, layers, experts per token] and offsets, and may have probs, token and category."""
    check_output(output, "--output")
    if model.endswith(".npz"):
        if texts or options or answer != 1 or sketch:
            raise UsageError("an .npz file is recorded already: give only -o, --num-experts and --expert-bytes")
        if experts_in_layer is None:
            raise UsageError(f"{model}: say how many experts a layer has with --num-experts")
        from tidegate.experts.trace_import import import_npz  # noqa: PLC0415

        size = parse_bytes(expert_size, "--expert-bytes") if expert_size else 0
        import_npz(Path(model), output, experts_in_layer, size)
    else:
        if experts_in_layer is not None or expert_size is not None:
            raise UsageError("--num-experts and --expert-bytes are for an .npz file; a model knows its own")
        if not texts:
            raise UsageError("give at least one text file")
        _record(model, texts, output, answer, sketch, options)
    print(f"{output}: {format_bytes(output.stat().st_size)}", file=sys.stderr)
    return 0


def _record(path: str, texts: list[Path], output: Path, answer: int, sketch: int, options: dict[str, Any]) -> None:
    from tidegate.engine.model import load  # noqa: PLC0415  (an import needs no engine)
    from tidegate.engine.needs import DEFAULT_CHUNK_TOKENS  # noqa: PLC0415
    from tidegate.experts.trace import take_sketch_memory  # noqa: PLC0415

    contents = [read_utf8(text) for text in texts]
    if sketch:  # which the plan does not count: little of it then, and what can be before the plan
        take_sketch_memory(sketch)
        options.setdefault("prefill_chunk", DEFAULT_CHUNK_TOKENS)
    with converting(path) as progress:
        model = load(path, progress=progress, **options)
    with model, model.trace(output, path, sketch) as writer, counted("tokens read") as recorded:
        if answer >= model.context:
            raise UsageError(f"--answer {answer}: the context is {model.context} tokens; raise --context")
        piece = model.context - answer
        read = [model.encode(content) for content in contents]
        for text, ids in zip(texts, read, strict=True):
            if not ids:
                raise UsageError(f"{text}: is empty; there is nothing to record")
        advance = recorded.of(sum(map(len, read)))
        sequence = 0
        for start in range(0, max(map(len, read)), piece):
            for text, ids in zip(texts, read, strict=True):
                if start < len(ids):
                    sequence += 1
                    writer.categories[sequence] = text.stem
                    model.generate(ids[start : start + piece], max_tokens=answer, ignore_eos=True)
                    advance(len(ids[start : start + piece]))
