"""The texts of `templates/`."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"


def shell(name: str) -> str:
    """One of them, by name."""
    return (_FOLDER / f"{name}.jinja").read_text()
