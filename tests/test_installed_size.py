"""What `pip install tidegate` puts on the disk: the package and everything it needs at run time."""

import re
from importlib import metadata
from pathlib import Path

import pytest

LIMIT_BYTES = 150_000_000


def _closure(name: str, sizes: dict[str, int]) -> None:
    """Sizes of a distribution and of what it requires without extras, by normalized name."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in sizes:
        return
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # a requirement of other platforms or Python versions
        return
    paths = [Path(file.locate()) for file in distribution.files or []]
    sizes[name] = sum(path.stat().st_size for path in paths if path.exists())
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            _closure(re.split(r"[ ;<>=!~\[(]", requirement)[0], sizes)


def test_the_package_and_its_run_time_dependencies_stay_small():
    try:
        metadata.distribution("tidegate")
    except metadata.PackageNotFoundError:
        pytest.skip("tidegate runs from its source tree, it is not installed")
    sizes: dict[str, int] = {}
    _closure("tidegate", sizes)
    print({name: f"{size / 1e6:.1f} MB" for name, size in sorted(sizes.items(), key=lambda item: -item[1])})
    assert {"tidegate", "numpy", "tokenizers", "click", "jinja2"} <= sizes.keys()
    assert "torch" not in sizes
    assert sum(sizes.values()) < LIMIT_BYTES
