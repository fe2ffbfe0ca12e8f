"""docs/options.md is the option tables of config.py. ``python tests/test_docs_options.py`` writes it anew."""

from pathlib import Path

from tidegate.config import EngineOptions, SamplingOptions, markdown_table

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def page() -> str:
    return (
        "# Options\n\nMade from `src/tidegate/config.py` by `python tests/test_docs_options.py`; do not edit.\n\n"
        "The same names are flags of `tidegate run` and keywords of the Python interface. Bytes need a unit "
        "(`8GiB` is 8 x 1024^3, `8GB` is 8 x 1000^3).\n\n"
        "## Loading: `tidegate.load(path, ...)`\n\n"
        f"{markdown_table(EngineOptions)}\n"
        "`--sequences` is for the Python interface; `tidegate run` answers one sequence.\n\n"
        "## Answering: `Model.generate(prompts, ...)`, `stream`, `chat`\n\n"
        f"{markdown_table(SamplingOptions)}\n"
        "`logprobs` is for the Python interface.\n"
    )


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python tests/test_docs_options.py"


if __name__ == "__main__":
    PAGE.write_text(page())
