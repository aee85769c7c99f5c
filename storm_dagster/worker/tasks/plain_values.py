"""Plain forms of a component's values, for metrics and messages."""

from typing import Any

import msgspec

from storm_dagster.model.errors import InvalidRequest, error_text
from storm_dagster.model.json_values import metric_number

_METRIC_BYTES = 16 << 10
"""Longest name and value of a metric together, encoded."""


def metric_value(name: Any, value: Any) -> tuple[str, Any]:
    """Return name and value of a metric in a form that every report can have.

    Scalars of numpy and similar types become numbers, NaN and infinities text
    (:data:`~storm_dagster.model.json_values.NON_FINITE`); ``InvalidRequest`` for other types. The
    value is a copy: the component may change its own.
    """
    try:
        if type(value) not in (int, float, bool, str) and hasattr(value, "__float__"):
            value = int(value) if hasattr(value, "__index__") else float(value)
        if type(value) is float:
            value = metric_number(value)
        raw = msgspec.msgpack.encode((str(name)[:200], value))
        if len(raw) > _METRIC_BYTES:
            raise ValueError(f"it takes {len(raw)} bytes, at most {_METRIC_BYTES} are kept")
        plain_name, plain_value = msgspec.msgpack.decode(raw)
        # A page with the metric must be valid in JSON, too.
        msgspec.json.encode((plain_name, plain_value))
        return plain_name, plain_value
    except Exception as error:
        raise InvalidRequest(
            f"metric {short_repr(name)} cannot be published ({type(value).__name__}; "
            f"{error_text(error)}): report a number"
        ) from None


def short_repr(value: Any, max_length: int = 60) -> str:
    """Return the beginning of a value's ``repr``, for a message.

    A value whose ``repr`` raises is named by its type.
    """
    try:
        return repr(value)[:max_length]
    except Exception:
        return f"<{type(value).__name__}>"
