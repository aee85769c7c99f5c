"""Components that are programs, with Storm's multilang protocol on standard input and output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from storm_dagster.api.component import Component
from storm_dagster.api.specs import Inputs, Spec
from storm_dagster.api.streams import Outputs
from storm_dagster.model.errors import InvalidTopology


class _Shell(Component):
    command: ClassVar[str | Sequence[str] | None] = None
    """The program, such as ``"python"`` or ``["ruby", "-W0"]``."""
    script: ClassVar[str | None] = None
    """Its script, relative to the archive's ``resources/`` folder."""

    @classmethod
    def spec(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        name: str | None = None,
        command: str | Sequence[str] | None = None,
        script: str | None = None,
        inputs: Inputs = None,
        par: int | None = None,
        config: Mapping[str, Any] | None = None,
        outputs: Outputs = None,
    ) -> Spec:
        """The program as part of a topology; ``command`` and ``script`` default to the class's own.

        It is started without a shell, with the archive's ``resources/`` as its working folder, and
        replaced, its tuples replayed, when it dies or hangs.
        """
        chosen = cls.command if command is None else command
        words = [chosen] if isinstance(chosen, str) else list(chosen or ())
        tail = cls.script if script is None else script
        if tail is not None:
            words.append(tail)
        if not words or not all(isinstance(word, str) and word for word in words):
            raise InvalidTopology(f"{cls.__name__}.spec needs a command, such as command='python', script='count.py'")
        made = super().spec(name, inputs, par, config, outputs)
        made._code, made._shell = None, tuple(words)
        return made


class ShellBolt(_Shell):
    """A bolt that is a multilang program."""

    _kind = "bolt"


class ShellSpout(_Shell):
    """A spout that is a multilang program."""

    _kind = "spout"
