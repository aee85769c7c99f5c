"""YAML texts of users: confs, and values of a command line."""

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """Value of a YAML text.

    ``ValueError`` for a text that is not YAML: its message is one line with the problem and its
    place, without the text itself, which may hold a secret.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(_problem(error)) from None
    except ValueError:
        # PyYAML takes the form of a value for its type, and then cannot make it: 2026-02-30, 0b_.
        raise ValueError(
            "a value looks like a date or a number, and is not a valid one: put it in quotes"
        ) from None
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def _problem(error: yaml.YAMLError) -> str:
    """Problem that PyYAML found, and its place."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"a character that YAML does not allow, at position {error.position}"
    problem = getattr(error, "problem", None) or type(error).__name__
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(problem)
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}"
