"""``tidegate train``: start or resume a training run, or export its newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tidegate.cli.arguments import Argument, Flag
from tidegate.errors import UsageError
from tidegate.train.options import RouterOptions, TrainOptions

_RUN, _ROUTER = "Run", "Router"
_DEFAULTS = TrainOptions()


def _run(text: str, field: str) -> Flag:
    return Flag(group=_RUN, help=f"{text}  [default: {getattr(_DEFAULTS, field)}]")


def _router(text: str, field: str) -> Flag:
    return Flag(group=_ROUTER, help=f"{text}  [default: {getattr(_DEFAULTS.router, field)}]")


def command(
    run: Annotated[Path, Argument(help="Folder of the run: checkpoints, curve, options.")],
    tokens: Annotated[Path, Flag(help="Folder of token files, made by python -m tidegate.train.tokenizer.")],
    resume: Annotated[bool, Flag("--resume", help="Go on from the newest checkpoint.")] = False,
    export: Annotated[
        Path | None, Flag(help="Train nothing; write the newest checkpoint as a Hugging Face folder.")
    ] = None,
    time_limit: Annotated[float | None, Flag(help="Save and stop after this many seconds.")] = None,
    steps: Annotated[int | None, _run("Optimizer steps in all.", "steps")] = None,
    decay_steps: Annotated[int | None, _run("How many steps at the end have a falling rate.", "decay_steps")] = None,
    warmup_steps: Annotated[int | None, _run("How many steps at the start have a rising rate.", "warmup_steps")] = None,
    matrix_rate: Annotated[float | None, _run("Peak learning rate of matrices.", "matrix_rate")] = None,
    other_rate: Annotated[float | None, _run("Peak learning rate of everything else.", "other_rate")] = None,
    batch_sequences: Annotated[int | None, _run("Sequences a step.", "batch_sequences")] = None,
    sequence_length: Annotated[int | None, _run("Tokens a sequence.", "sequence_length")] = None,
    seed: Annotated[int | None, _run("Seed of weights and batches.", "seed")] = None,
    workers: Annotated[int | None, _run("Processes; one a core is best.", "world_size")] = None,
    device: Annotated[str | None, _run("cpu, or a torch device.", "device")] = None,
    no_compile: Annotated[
        bool, Flag("--no-compile", group=_RUN, help="Do not compile the model: needs no C++ compiler, is slower.")
    ] = False,
    qat_from_step: Annotated[
        int | None, _run("Experts compute with int4 values from this step on; -1: never.", "qat_from_step")
    ] = None,
    balance_alpha: Annotated[float | None, _router("Weight of the balance loss.", "balance_alpha")] = None,
    balance_scope: Annotated[
        str | None, _router("Balance over a batch or a window of tokens.", "balance_scope")
    ] = None,
    z_loss: Annotated[float | None, _router("Weight of the router z-loss.", "z_loss")] = None,
    bias_rate: Annotated[
        float | None, _router("Balance by a bias that moves by this much a step; 0: no bias.", "bias_rate")
    ] = None,
    capacity_factor: Annotated[
        float | None, _router("Limit of an expert's load, in times its fair share; 0: none.", "capacity_factor")
    ] = None,
    router_temperature_end: Annotated[
        float | None, _router("Temperature of the router's logits from half of the steps on.", "temperature_end")
    ] = None,
    router_init: Annotated[str | None, _router("Initial router weights: normal or orthogonal.", "init")] = None,
    router_input: Annotated[str | None, _router("What the router reads: plain, centered or standard.", "input")] = None,
) -> int:
    """Curves are written as curve.jsonl and curve.png. A killed run loses at most four minutes."""
    plain = given(
        steps=steps, decay_steps=decay_steps, warmup_steps=warmup_steps, matrix_rate=matrix_rate, other_rate=other_rate,
        batch_sequences=batch_sequences, sequence_length=sequence_length, seed=seed, world_size=workers,
        qat_from_step=qat_from_step, device=device, compile=False if no_compile else None,
    )  # fmt: skip
    router = given(
        balance_alpha=balance_alpha, balance_scope=balance_scope, z_loss=z_loss, bias_rate=bias_rate,
        capacity_factor=capacity_factor, temperature_end=router_temperature_end, init=router_init,
        input=router_input,
    )  # fmt: skip
    if export is not None:
        if plain or router or resume:
            raise UsageError("--export goes with no training option: it writes the newest checkpoint as it is")
        export_latest(run, tokens, export)
        return 0
    if resume and (seed is not None or set(router) - {"balance_alpha", "z_loss"}):
        raise UsageError(
            "--resume: the seed and all router options but the two losses are the run's own; leave them out"
        )
    train(run, tokens, resume, plain, router, time_limit)
    return 0


def given(**values: Any) -> dict[str, Any]:
    """The options that the user gave."""
    return {name: value for name, value in values.items() if value is not None}


def export_latest(run: Path, tokens: Path, destination: Path) -> None:
    from tidegate.train.checkpoint import latest  # noqa: PLC0415  (torch)
    from tidegate.train.export import export  # noqa: PLC0415

    source = latest(run)
    export(source, tokens / "tokenizer.json", destination)
    print(f"{source.name} written to {destination}")


def train(
    run: Path, tokens: Path, resume: bool, plain: dict[str, Any], router: dict[str, Any], time_limit: float | None
) -> None:
    from tidegate.train.progress import Progress  # noqa: PLC0415  (torch)
    from tidegate.train.trainer import Trainer  # noqa: PLC0415

    if resume:
        trainer = Trainer.resume(run, tokens, plain, router)
    elif list(run.glob("checkpoint-*.pt")):
        raise UsageError(f"{run}: holds a run already; --resume goes on with it")
    else:
        trainer = Trainer(run, tokens, TrainOptions(router=RouterOptions(**router), **plain))
    with Progress(trainer.options, run) as progress:
        trainer.run(progress, time_limit_s=time_limit or float("inf"))
