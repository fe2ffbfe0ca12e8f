"""docs/cli.md is what `tidegate COMMAND --help` says, for every command. ``python tests/test_docs_cli.py`` writes it anew."""

from pathlib import Path
from typing import Any

from tidegate import cli

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def _row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = parameter.name.upper() if is_argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| `{names}`{' (required)' if parameter.required else ''} | {text} |"


def page() -> str:
    parts = [
        "# Commands\n\nMade from the commands' own help by `python tests/test_docs_cli.py`; do not edit. Every command has "
        "`--help`.\nAn error is one line on standard error; exit codes: 0 done, 1 failed, 2 wrong use or a budget that is too "
        "small, 130 interrupted.\n"
    ]
    for name, summary in cli.COMMANDS.items():
        rows = "\n".join(_row(parameter) for parameter in cli.load_command(name).params)
        parts.append(f"## tidegate {name}\n\n{summary}\n\n| | |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python tests/test_docs_cli.py"


if __name__ == "__main__":
    PAGE.write_text(page())
