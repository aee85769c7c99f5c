"""PostgreSQL as a sink."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from storm_dagster.connectors.postgres_columns import (
    COLUMNS_QUERY,
    Column,
    column_of,
    columns_of,
)
from storm_dagster.connectors.postgres_errors import reason_of, unsent_reason_of
from storm_dagster.connectors.postgres_values import ColumnMisfit, column_value, plain_types
from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sinks import Rejected, Retry, Row, write_or_reject
from storm_dagster.model.errors import InvalidRequest, Unavailable

_MIN_MISFITS = 10
"""Number of rows, all of which do not fit, from which on the table is at fault."""
_MISFIT_ERRORS = (
    "DatatypeMismatch",
    "UndefinedColumn",
    "SyntaxError",
    "GeneratedAlways",
    "DuplicateColumn",
    "TooManyColumns",
    # A field with the name of a system column, such as ctid.
    "FeatureNotSupported",
    "ColumnMisfit",
)
"""Names of the errors of a row that does not fit the columns, or of any row."""
_ROW_ERRORS = (*_MISFIT_ERRORS, "ProgramLimitExceeded", "RaiseException")
"""Names of psycopg's errors that a row may cause, beside the classes in ``_is_row_error``."""
_RECORD_ID = "record_id"
"""Column of a row's id, unless the row has a field of this name."""
_TOKENS_TABLE = "storm_sink_tokens"
"""Table with a row for each owner: the token of its last batch, and its epoch."""
_SETTINGS: dict[str, Any] = {
    "application_name": "storm_dagster",
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
}
"""Settings with which a connection to a silent server ends within half a minute."""
_LIMITS = "set local lock_timeout = '10s'; set local idle_in_transaction_session_timeout = '60s'"
"""Limits of a transaction.

They bound the time that a writer which was stopped inside of one holds the row of its token.
"""


_NamedColumn = tuple[str, Column | None, tuple[type, ...]]
"""Name and type of a column, and the types of values that are sent as they are."""


class PostgresSink:
    """Sink that writes rows to a table whose columns have the names of the fields.

    Needs the extra ``postgres``. A row replaces the row with the same ``key`` (columns of a unique
    constraint). The default key is the column ``record_id``, which gets the row's id. With
    ``exactly_once`` there is no default key, and rows are only inserted. Then the newest token of
    each task is a row of the table ``storm_sink_tokens``, which is created if it is missing, in the
    transaction of the rows.

    The conf has the connection's parameters below ``prefix``: ``postgres.host``,
    ``postgres.dbname``, ``postgres.password.file`` and any other one of libpq. Rows that break a
    constraint or do not fit their columns are rejected.

    A reader of a column gets a value that is equal to that of the row, or the row is rejected by
    column, type and remedy: docs/sinks.md has the table of types. With ``rounds``, numbers and
    times are rounded to the precision of their column. A column of ``json`` or ``jsonb`` takes any
    value of JSON: text becomes text of JSON, a list or tuple an array of JSON. ``None`` is NULL of
    SQL; inside a list or map it is null of JSON.
    """

    def __init__(
        self,
        table: str,
        key: str | Sequence[str] = (),
        *,
        rounds: bool = False,
        prefix: str = "postgres.",
    ) -> None:
        self._table = table
        self._rounds = rounds
        self._prefix = prefix
        self.assets = assets_of("postgres", table)
        qualified = table if "." in table else f"public.{table}"
        name = f"{{{prefix}dbname}}.{qualified}"
        self.asset_metadata = {
            self.assets[0]: {
                "dagster/table_name": name,
                "dagster/uri": f"postgres://{{{prefix}host}}:{{{prefix}port=5432}}/{name}",
                "dagster/storage_kind": "postgres",
            }
        }
        self._key = [key] if isinstance(key, str) else list(key)
        """Columns of the key; empty: the default, see :meth:`_insert`."""
        self._db: Any = None
        """The connection; ``None`` before the first :meth:`open`."""
        self._owner = ""
        self._epoch = 0
        """Number of this opening of the owner, which each write compares with the table."""
        self._columns: dict[str, Column] = {}
        """Types of the columns; empty if the table does not exist."""

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect, and return the owner's token; ``None`` without an owner.

        Waits for the end of an earlier transaction of the owner, at most ten seconds.
        """
        with client_library("postgres"):
            import psycopg
            from psycopg import sql
        self._psycopg = psycopg
        self._sql: Any = sql
        settings = {**_SETTINGS, **client_settings(conf, self._prefix)}
        self._db = psycopg.connect(**settings, autocommit=True)
        self._owner = owner
        self._columns = self._read_columns()
        if not owner:
            return None
        with self._db.transaction():
            self._db.execute(_LIMITS)
            table = self._db.execute("select to_regclass(%s)", [_TOKENS_TABLE]).fetchone()
            if table == (None,):
                columns = "(owner text primary key, token bigint not null, epoch bigint not null)"
                self._run(f"create table if not exists {{}} {columns}")
            # The epoch of this connection: the writes of earlier ones of the owner then fail.
            insert = "insert into {} as t values (%s, 0, 1)"
            update = "on conflict (owner) do update set epoch = t.epoch + 1 returning token, epoch"
            token, self._epoch = self._run(f"{insert} {update}", owner).fetchone()
        return token

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Insert all rows in one transaction, with the token.

        Raises :class:`Rejected` for rows that do not fit, :class:`Retry` if the next call can
        insert more of them, and :class:`Unavailable` if the table fits no row, or the owner was
        opened elsewhere.
        """
        with self._db.transaction(), self._db.cursor() as cursor:
            if self._owner:
                self._db.execute(_LIMITS)
                update = "update {} set token = %s where owner = %s and epoch = %s"
                if self._run(update, token, self._owner, self._epoch).rowcount != 1:
                    raise Unavailable(
                        f"{self._owner} was opened elsewhere, "
                        f"and writes to {self._table} from there"
                    )
            # True once _insert has sent all rows of the batch: if the batch then fails, a deferred
            # constraint is broken, and the parts are checked, too.
            self._checks_constraints = False

            def insert(part: Sequence[Row]) -> None:
                try:
                    self._insert(cursor, part, part is rows)
                except (self._psycopg.Error, UnicodeError) as error:
                    if len(part) == 1 and self._is_row_error(error):
                        raise self._named_error(error, part[0]) from None
                    raise

            try:
                write_or_reject(rows, insert, self._is_row_error)
            except Rejected as rejected:
                self._check_columns()
                self._retry_refused(cursor, rows, rejected.rows)
                reasons = rejected.rows.values()
                misfits = [reason for reason in reasons if reason.startswith(_MISFIT_ERRORS)]
                if len(misfits) == len(rows) >= _MIN_MISFITS:
                    # If no row fits, the table is at fault.
                    raise Unavailable(
                        f"no row of a batch fits {self._table}: {misfits[0]}"
                    ) from None
                raise
            self._check_columns()

    def _named_error(self, error: Exception, row: Row) -> Exception:
        """An error about a row, with the column and the type of its value if they are known."""
        names = list(row.values)
        if self._has_own_id(row.values):
            names.append(_RECORD_ID)
        if getattr(error, "sqlstate", None) is not None:
            reason = reason_of(error, names, row.values, self._columns)
        else:
            reason = unsent_reason_of(error, self._unsent_column(row), row.values)
        return ValueError(reason) if isinstance(error, UnicodeError) else type(error)(reason)

    def _unsent_column(self, row: Row) -> str | None:
        """The column whose value the client cannot send; ``None`` if it is not known."""
        from psycopg.adapt import PyFormat, Transformer

        transformer = Transformer(self._db)
        for name, value in row.values.items():
            try:
                transformer.get_dumper(value, PyFormat.AUTO).dump(value)
            except Exception:
                return name
        return None

    def _key_columns(self) -> list[str]:
        """Columns of the key.

        With an owner no row is written twice, so that by default none is replaced.
        """
        return self._key or ([] if self._owner else [_RECORD_ID])

    def _has_own_id(self, fields: Collection[str]) -> bool:
        """True if the id of a row with these fields is a column of its own."""
        return _RECORD_ID in self._key_columns() and _RECORD_ID not in fields

    def _retry_refused(self, cursor: Any, rows: Sequence[Row], refused: dict[int, str]) -> None:
        """Insert the refused rows that only lacked a later row.

        They are removed from ``refused`` (index -> reason). Raises :class:`Retry` if none remains,
        since then no row is at fault. No effect unless deferred constraints were checked.
        """
        before = len(refused) + 1
        # Until a round inserts no further row: each row may have been that which another one needs.
        while self._checks_constraints and len(refused) < before:
            before = len(refused)
            for index in sorted(refused, reverse=True):
                try:
                    self._insert(cursor, [rows[index]], False)
                except Exception as error:
                    if not self._is_row_error(error):
                        raise
                else:
                    del refused[index]
        if not refused:
            raise Retry(0.1)

    def close(self) -> None:
        """Close the connection."""
        if self._db is not None:
            self._db.close()

    def _run(self, statement: str, *values: Any) -> Any:
        """Run a statement on the table of tokens."""
        sql = self._sql
        return self._db.execute(sql.SQL(statement).format(sql.Identifier(_TOKENS_TABLE)), values)

    def _is_row_error(self, error: Exception) -> bool:
        """True if a row may be at fault, and not the table or the connection."""
        pg = self._psycopg
        if isinstance(error, pg.ProgrammingError) and getattr(error, "sqlstate", None) is None:
            # A value cannot be sent. With a state of the server the table is at fault.
            return True
        if type(error).__name__ in _ROW_ERRORS:
            return True
        return isinstance(error, pg.DataError | pg.IntegrityError | TypeError | ValueError)

    def _insert(self, cursor: Any, rows: Sequence[Row], is_batch: bool) -> None:
        """Insert rows, all or none. ``is_batch``: they are all rows of the batch.

        Raises the error of a row that does not fit, or of the table.
        """
        key = self._key_columns()
        with self._db.transaction():
            # A statement for each run of rows with the same fields.
            for fields, same_fields in groupby(rows, lambda row: tuple(row.values)):
                names = list(fields)
                if not names:
                    raise ColumnMisfit(
                        "the row has no columns: return a map with fields, or None, from row_of"
                    )
                if self._has_own_id(fields):
                    names.append(_RECORD_ID)
                own_rows = list(same_fields)
                columns = [self._named_column(name) for name in names]
                lines = [self._values(row, columns) for row in own_rows]
                if _RECORD_ID in key:
                    self._move_former_ids(cursor, own_rows)
                cursor.executemany(self._statement(names, key), lines)
            # These checks fail as the commit would. A row may need a later one: parts are checked
            # only if all rows fail.
            self._checks_constraints = self._checks_constraints or is_batch
            if self._checks_constraints:
                self._db.execute("set constraints all immediate; set constraints all deferred")

    def _move_former_ids(self, cursor: Any, rows: Sequence[Row]) -> None:
        """Give the rows that an earlier release has written the ids of this one.

        A row that has its new id already stays.
        """
        ids = [
            {"id": row.id, "former": row.former_id}
            for row in rows
            if row.former_id is not None and _RECORD_ID not in row.values
        ]
        if not ids:
            return
        sql = self._sql
        text = (
            "update {table} set {column} = %(id)s where {column} = %(former)s "
            "and not exists (select from {table} where {column} = %(id)s)"
        )
        statement = sql.SQL(text).format(
            table=self._identifier(*self._table.split(".")), column=sql.Identifier(_RECORD_ID)
        )
        cursor.executemany(statement, ids)

    def _named_column(self, name: Any) -> _NamedColumn:
        column = column_of(self._columns, name)
        return name, column, plain_types(column)

    def _values(self, row: Row, columns: Sequence[_NamedColumn]) -> list[Any]:
        """The parameters of the statement for a row."""
        values: list[Any] = []
        for name, column, types in columns:
            # The row's id is the value of a column that the row lacks.
            value = row.values.get(name, row.id)
            if type(value) not in types:
                value = self._checked_value(row, name, column)
            values.append(value)
        return values

    def _checked_value(self, row: Row, name: str, column: Column | None) -> Any:
        """The parameter for a column of a row.

        Raises ``ValueError`` for a value that the column would change, and
        :class:`InvalidRequest` for a row without an id.
        """
        if name not in row.values and row.id is None:
            raise InvalidRequest(
                f"rows for {self._table} have no id, so that a repeated one would be there twice: "
                "set record_id of the bolt, or the key of the sink to the columns of a unique "
                "constraint"
            )
        value = row.values.get(name, row.id)
        try:
            return column_value(value, column, rounds=self._rounds)
        except ValueError as error:
            kind = f" ({column.name})" if column else ""
            reason = f'column "{name}"{kind} of {self._table}: {error}'
            misfit = ColumnMisfit if isinstance(error, ColumnMisfit) else ValueError
            raise misfit(reason) from None

    def _read_columns(self) -> dict[str, Column]:
        """Types of the columns; none if the table does not exist."""
        sql = self._sql
        table = sql.Identifier(*self._table.split(".")).as_string(self._db)
        return columns_of(self._db.execute(COLUMNS_QUERY, [table]).fetchall())

    def _check_columns(self) -> None:
        """Read the types once more, while the rows' lock on the table prevents a change.

        Raises :class:`Retry` if another session has changed them: the values were encoded for other
        types.
        """
        columns = self._read_columns()
        if columns != self._columns:
            self._columns = columns
            raise Retry(0.1, f"the columns of {self._table} have changed")

    def _placeholder(self, name: str) -> Any:
        sql = self._sql
        column = column_of(self._columns, name)
        if column is None or not column.is_json:
            return sql.Placeholder()
        # Without a cast a list of texts is text[], which the server does not convert.
        column_type = column.type + ("[]" if column.is_array else "")
        return sql.SQL("{}::pg_catalog." + column_type).format(sql.Placeholder())

    def _identifier(self, *names: Any) -> Any:
        """A name in a statement with parameters, in which psycopg reads ``%`` as their begin."""
        parts = [name.replace("%", "%%") if isinstance(name, str) else name for name in names]
        return self._sql.Identifier(*parts)

    def _statement(self, names: Sequence[str], key: Sequence[str]) -> Any:
        """The statement that inserts these columns, or updates the row with the same key."""
        sql = self._sql
        comma = sql.SQL(", ")
        update = sql.SQL("{0} = excluded.{0}")
        updates = [update.format(self._identifier(name)) for name in names if name not in key]
        text = "insert into {table} ({columns}) values ({placeholders})"
        if key:
            action = "do update set {updates}" if updates else "do nothing"
            text += f" on conflict ({{key}}) {action}"
        return sql.SQL(text).format(
            table=self._identifier(*self._table.split(".")),
            columns=comma.join([self._identifier(name) for name in names]),
            placeholders=comma.join([self._placeholder(name) for name in names]),
            key=comma.join([self._identifier(name) for name in key]),
            updates=comma.join(updates),
        )
