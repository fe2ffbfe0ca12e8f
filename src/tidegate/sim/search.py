"""A sweep by Optuna (the extra ``sweep``) instead of a whole grid: a hundred runs find what a grid of thousands would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidegate.errors import UsageError
from tidegate.sim.sweep import NUM_GOALS, Configuration, Result, goals

Axes = Mapping[str, Sequence[Any]]
_ATTEMPTS = 4  # a suggestion made before costs nothing


def search(
    axes: Axes, configure: Callable[..., Configuration], run: Callable[[Configuration], Result], trials: int, seed: int
) -> list[Result]:
    """Every configuration that was tried, in order, each once, ``trials`` of them if there are so many. Axes are lists of
    choices; one of several floats is a range, from the least to the largest, in hundredths. Same seed, same answer. Raises
    UsageError without Optuna."""
    try:
        import optuna  # noqa: PLC0415  (an optional extra)
    except ImportError:
        raise UsageError('--sweep optuna needs Optuna: pip install "tidegate[sweep]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a trial that fails ends the search with its own error
    found: dict[Configuration, Result] = {}

    def objective(trial: Any) -> tuple[float, ...]:
        config = configure(**{name: _suggest(trial, name, values) for name, values in axes.items()})
        if config not in found:
            found[config] = run(config)
        return goals(found[config])

    def stop_when_enough(study: Any, trial: Any) -> None:
        if len(found) >= trials:
            study.stop()

    sampler = optuna.samplers.NSGAIISampler(population_size=max(8, trials // 2), seed=seed)
    study = optuna.create_study(directions=["maximize"] * NUM_GOALS, sampler=sampler)
    study.optimize(objective, n_trials=_ATTEMPTS * trials, callbacks=[stop_when_enough])
    return list(found.values())


def _suggest(trial: Any, name: str, values: Sequence[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, float) for value in values):
        return round(trial.suggest_float(name, min(values), max(values)), 2)
    return values[trial.suggest_categorical(name, range(len(values)))]
