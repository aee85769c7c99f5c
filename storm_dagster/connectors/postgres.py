"""PostgreSQL as a sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from storm_dagster.connectors.settings import client_library, client_settings
from storm_dagster.connectors.sinks import Rejected, Row
from storm_dagster.model.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from psycopg import Connection, Cursor
    from psycopg.sql import Composed

__all__ = ["PostgresSink"]

_RECORD_ID = "record_id"
_SETTINGS: dict[str, Any] = {
    **{"application_name": "storm_dagster", "connect_timeout": 10, "tcp_user_timeout": 30_000},
    **{"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4},
}
"""A server that is silent is given up within half a minute."""
_LIMITS = "set local lock_timeout = '10s'; set local idle_in_transaction_session_timeout = '60s'"
"""A writer that was stopped inside a transaction holds the row of its token no longer than this."""


class PostgresSink:
    """Writes rows to a table whose columns are named as the fields. Needs the extra ``postgres``.

    A row with the ``key`` (columns of a unique constraint) of another one replaces it. The default key is the column
    ``record_id``, which gets the row's id; with ``exactly_once`` there is none, and rows are only inserted. Then the newest
    token of each task is a row of ``token_table``, which is created if it is missing, in the transaction of the rows.

    The conf has the connection's parameters below ``prefix``: ``postgres.host``, ``postgres.dbname``,
    ``postgres.password.file`` and any other one of libpq. Maps are written as ``jsonb``, lists as arrays. Rows that break a
    constraint or do not fit their columns are rejected.
    """

    def __init__(
        self,
        table: str,
        key: str | Sequence[str] | None = None,
        *,
        token_table: str = "storm_sink_tokens",
        prefix: str = "postgres.",
    ) -> None:
        self._prefix = prefix
        self._table, self._token_table = table, token_table
        self._key: list[str] | None = [key] if isinstance(key, str) else list(key) if key else None
        self._db: Connection[Any] | None = None
        self._owner, self._epoch = "", 0

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect; :class:`Unavailable` waits for an earlier transaction of the owner to end, or to be ended."""
        with client_library("postgres"):
            import psycopg
            from psycopg.sql import SQL
        db = self._db = psycopg.connect(**{**_SETTINGS, **client_settings(conf, self._prefix)}, autocommit=True)
        self._owner = owner
        if not owner:
            return None
        tokens = self._named(self._token_table)
        with db.transaction():
            db.execute(_LIMITS)
            if db.execute("select to_regclass(%s)", [tokens.as_string(db)]).fetchone() == (None,):
                table = SQL(
                    "create table if not exists {} (owner text primary key, token bigint not null, epoch bigint not null)"
                )
                db.execute(table.format(tokens))
            # The epoch of this connection: an earlier one of the owner writes nothing any more.
            opening = SQL(
                "insert into {0} as t values (%s, 0, 1) on conflict (owner) do update set epoch = t.epoch + 1 "
                "returning token, epoch"
            )
            found = db.execute(opening.format(tokens), [owner]).fetchone()
        assert found is not None
        token, self._epoch = found
        return token

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Insert all rows in one transaction, with the token."""
        assert self._db is not None
        from psycopg.sql import SQL

        with self._db.transaction(), self._db.cursor() as cursor:
            if self._owner:
                cursor.execute(_LIMITS)
                update = SQL("update {} set token = %s where owner = %s and epoch = %s")
                cursor.execute(update.format(self._named(self._token_table)), [token, self._owner, self._epoch])
                if cursor.rowcount != 1:
                    raise Unavailable(f"{self._owner} was opened elsewhere, and writes to {self._table} from there")
            self._insert(cursor, rows)

    def close(self) -> None:
        """Close the connection."""
        if self._db is not None:
            self._db.close()

    def _named(self, table: str) -> Any:
        from psycopg.sql import Identifier

        return Identifier(*table.split("."))

    def _insert(self, cursor: Cursor[Any], rows: Sequence[Row]) -> None:
        """Insert rows; :class:`Rejected` names those that can never be inserted, found by halves."""
        import psycopg

        try:
            with cursor.connection.transaction():
                self._try_insert(cursor, rows)
            return
        except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError) as error:
            # Without a state of the server, a value has no type that it knows. Else the table is at fault, not a row.
            if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is not None:
                raise
            if len(rows) == 1:
                raise Rejected({0: f"{type(error).__name__}: {error}"}) from None
        refused: dict[int, str] = {}
        middle = len(rows) // 2
        for first, part in ((0, rows[:middle]), (middle, rows[middle:])):
            try:
                self._insert(cursor, part)
            except Rejected as found:
                refused.update({first + at: why for at, why in found.rows.items()})
        if refused:
            raise Rejected(refused)

    def _try_insert(self, cursor: Cursor[Any], rows: Sequence[Row]) -> None:
        for columns, same in groupby(rows, lambda row: tuple(row.values)):
            names = list(columns)
            if self._key is None and not self._owner and _RECORD_ID not in names:
                names.append(_RECORD_ID)
            lines = [[self._value(row, name) for name in names] for row in same]
            cursor.executemany(self._statement(names), lines)

    def _value(self, row: Row, name: str) -> Any:
        if name == _RECORD_ID and name not in row.values:
            if row.id is None:
                raise InvalidRequest(
                    f"rows for {self._table} have no id, and a repeated one could not be told from another: set record_id "
                    "of the bolt, or key to the columns of a unique constraint"
                )
            return row.id
        value = row.values[name]
        if isinstance(value, dict):
            from psycopg.types.json import Jsonb

            return Jsonb(value)
        return value

    def _statement(self, names: list[str]) -> Composed:
        from psycopg.sql import SQL, Identifier

        parts = [
            SQL("insert into {} ({}) values ({})").format(
                self._named(self._table),
                SQL(", ").join(map(Identifier, names)),
                SQL(", ").join([SQL("%s")] * len(names)),
            )
        ]
        key = self._key or ([] if self._owner else [_RECORD_ID])
        if key:
            rest = [SQL("{0} = excluded.{0}").format(Identifier(name)) for name in names if name not in key]
            action = SQL("update set {}").format(SQL(", ").join(rest)) if rest else SQL("nothing")
            parts.append(SQL("on conflict ({}) do {}").format(SQL(", ").join(map(Identifier, key)), action))
        return SQL(" ").join(parts)
