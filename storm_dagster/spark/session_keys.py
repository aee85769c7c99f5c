"""Keys of ``topology.spark.conf`` in a Spark session: those that Spark refuses or ignores.

pyspark alone only warns of a key that the server refuses, and stores any unknown key. Over Connect
a session can change the runtime keys of Spark SQL. Keys of Spark's core and static keys are read
when the server starts, and the server refuses them. It has no list of the keys that other libraries
read, so that an unknown key is never refused.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.model.conf import HIDDEN, is_secret_key

_log = logging.getLogger(__name__)
_LIKENESS = 0.9
"""Least similarity of an unknown key and one of Spark, from 0 to 1, for "did you mean"."""


@dataclass(frozen=True)
class KeysResult:
    """Outcome of setting keys in a session."""

    refused: tuple[str, ...] = ()
    """A sentence for each key that the session refuses."""
    misspelled: tuple[str, ...] = ()
    """A sentence for each key that Spark does not know, and that is like one that it knows."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """All sentences, refused keys first."""
        return (*self.refused, *self.misspelled)


SparkKeyCheck = Callable[[str, Mapping[str, str]], KeysResult]
"""Function that asks the server at a URL about keys; :class:`Unavailable` if it does not answer."""


def no_key_check(url: str, keys: Mapping[str, str]) -> KeysResult:
    """Check in a process that opens no Spark session: it finds nothing."""
    return KeysResult()


def string_keys(spark_conf: Mapping[Any, Any] | None) -> dict[str, str]:
    """The keys of ``topology.spark.conf`` as Spark reads them: a boolean is ``true`` or ``false``.

    Keys whose value is null are left out.
    """
    strings: dict[str, str] = {}
    for key, value in (spark_conf or {}).items():
        if value is None:
            continue
        strings[str(key)] = str(value).lower() if isinstance(value, bool) else str(value)
    return strings


def set_keys(session: Any, keys: Mapping[str, str]) -> KeysResult:
    """Set the keys in a Connect session.

    Keys that Spark does not know are set and logged. Raises the error of a server that does not
    answer.
    """
    refused, unknown = try_keys(session, keys)
    return KeysResult(tuple(refused), tuple(misspelled_keys(session, unknown)))


def try_keys(session: Any, keys: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Set the keys in a Connect session, one by one; return sentences and unknown keys.

    A sentence is about a key that the session refuses. Unknown are the keys that were set, and that
    are not of Spark SQL.
    """
    refused: list[str] = []
    unknown: list[str] = []
    for key, value in keys.items():
        try:
            session.conf.set(key, value)
            if not session.conf.isModifiable(key):
                unknown.append(key)
        except Exception as error:
            if not _answers(session, key):
                raise
            refused.append(_refusal(key, value, error))
    return refused, unknown


def read_back(session: Any, keys: Mapping[str, str]) -> KeysResult:
    """Compare the keys with those of the driver of a classic session, which was made with them.

    A driver that runs already in this process keeps its own values of the keys of its start. Raises
    Spark's error for a wrong value.
    """
    driver_conf = session.sparkContext.getConf()
    refused: list[str] = []
    for key, value in keys.items():
        if session.conf.isModifiable(key):
            continue
        current = driver_conf.get(key)
        if current is not None and current != value:
            shown = HIDDEN if is_secret_key(key) else repr(current)
            refused.append(
                f"{key} is {shown} in the Spark driver that runs already in this process: give all "
                "Spark components of the topology the same topology.spark.conf"
            )
    return KeysResult(tuple(refused))


def _answers(session: Any, key: str) -> bool:
    """True if the server answers a question about the key: then its error was a refusal."""
    try:
        session.conf.isModifiable(key)
    except Exception:
        return False
    return True


def _refusal(key: str, value: str, error: Exception) -> str:
    """Sentence about a key that the session refuses, with the remedy."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if is_secret_key(key):
        reason = reason.replace(value, HIDDEN)
        value = HIDDEN
    remedy = "correct or remove it"
    if "CANNOT_MODIFY" in reason:
        remedy = (
            "Spark reads it when its server starts: set it in storm.yaml for the embedded server, "
            "by spark-submit --conf for a server of your own, or use spark.master"
        )
    return f"{key}: {value:.200} is refused by Spark ({reason:.300}): {remedy}"


def misspelled_keys(session: Any, unknown: Collection[str]) -> list[str]:
    """Sentences about unknown keys that are like one of Spark SQL; the others are logged.

    The server lists the keys of Spark SQL, and none of Spark's core.
    """
    if not unknown:
        return []
    # Only an unknown key needs it.
    from difflib import get_close_matches

    spark_sql_keys = [str(row[0]) for row in session.sql("SET -v").collect()]
    sentences: list[str] = []
    for key in unknown:
        nearest = get_close_matches(key, spark_sql_keys, n=1, cutoff=_LIKENESS)
        if nearest:
            sentences.append(
                f"{key} is not a key of Spark, and has no effect there: did you mean {nearest[0]}?"
            )
        else:
            _log.warning(
                "topology.spark.conf: %s is not a key of Spark SQL; it has an effect only if "
                "another library of the Spark server reads it",
                key,
            )
    return sentences
