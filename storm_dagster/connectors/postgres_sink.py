"""PostgreSQL as a sink."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from storm_dagster.connectors.json_text import NoJsonForm, json_text, type_name
from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sinks import Rejected, Retry, Row, write_or_reject
from storm_dagster.model.errors import InvalidRequest, Unavailable

_MIN_MISFITS = 10
"""Number of rows in a batch from which on the table is at fault if none of them fits."""
_MISFITS = ("DatatypeMismatch", "UndefinedColumn", "SyntaxError", "GeneratedAlways")
"""Errors of a row that may be errors of the table."""
_OF_ROW = (*_MISFITS, "ProgramLimitExceeded", "RaiseException")
_RECORD_ID = "record_id"
_TOKENS = "storm_sink_tokens"
_JSON_COLUMNS = """
with recursive part (name, type, is_array) as (
    select attname, atttypid, false from pg_catalog.pg_attribute
    where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped
  union all
    select name, case typtype when 'd' then typbasetype else typelem end, is_array or typtype <> 'd'
    from part join pg_catalog.pg_type on pg_type.oid = type
    where typtype = 'd' or typelem <> 0 and typlen = -1
)
select name::text, typname::text || case when is_array then '[]' else '' end
from part join pg_catalog.pg_type on pg_type.oid = type
where type in ('pg_catalog.json'::regtype, 'pg_catalog.jsonb'::regtype)
"""
"""Columns of a table that hold JSON -> type without the domains around it.

The element type of an array counts, since an array of ``jsonb`` has values of JSON, too. Users who
may only insert into the table may read the catalog.
"""
_MAX_NAME_BYTES = 63
"""PostgreSQL truncates longer names."""
_SETTINGS: dict[str, Any] = {
    "application_name": "storm_dagster",
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
}
"""With these a silent server is an error within half a minute."""
_LIMITS = "set local lock_timeout = '10s'; set local idle_in_transaction_session_timeout = '60s'"
"""A writer that was stopped inside a transaction locks its token for at most this time."""


class PostgresSink:
    """Sink that writes rows to a table whose columns are named as the fields.

    It needs the extra ``postgres``. A row with the ``key`` (columns of a unique constraint) of
    another one replaces it. The default key is the column ``record_id``, which gets the row's id;
    with ``exactly_once`` there is none, and rows are only inserted. Then the newest token of each
    task is a row of the table ``storm_sink_tokens``, which is created if it is missing, in the
    transaction of the rows.

    The conf has the connection's parameters below ``prefix``: ``postgres.host``,
    ``postgres.dbname``, ``postgres.password.file`` and any other one of libpq. Rows that break a
    constraint or do not fit their columns are rejected.

    A column of the type ``json`` or ``jsonb`` takes any value of JSON, and returns an equal one:
    text becomes text of JSON, and a list or tuple an array of JSON. ``None`` is NULL of SQL; inside
    a list or map it is null of JSON. A row whose value JSON cannot hold unchanged is rejected; the
    reason names the column. In an array of ``jsonb`` each element is such a value. In other columns
    lists are written as arrays, and maps as ``jsonb``.
    """

    def __init__(
        self, table: str, key: str | Sequence[str] = (), *, prefix: str = "postgres."
    ) -> None:
        self._table = table
        self._prefix = prefix
        self.assets = assets_of("postgres", table)
        self._key = [key] if isinstance(key, str) else list(key)
        self._db: Any = None
        self._owner = ""
        self._epoch = 0
        self._json_columns: dict[str, str] = {}
        """Column that holds JSON -> its type, such as ``jsonb`` or ``json[]``."""

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect.

        It waits at most ten seconds for the end of an earlier transaction of the owner.
        """
        with client_library("postgres"):
            import psycopg
            from psycopg.types.json import Json, Jsonb
        self._psycopg: Any = psycopg
        self._json = Jsonb
        self._json_wrappers = (Json, Jsonb)
        settings = {**_SETTINGS, **client_settings(conf, self._prefix)}
        self._db = psycopg.connect(**settings, autocommit=True)
        self._owner = owner
        self._json_columns = self._read_json_columns()
        if not owner:
            return None
        with self._db.transaction():
            self._db.execute(_LIMITS)
            if self._db.execute("select to_regclass(%s)", [_TOKENS]).fetchone() == (None,):
                columns = "(owner text primary key, token bigint not null, epoch bigint not null)"
                self._run(f"create table if not exists {{}} {columns}")
            # The epoch of this connection: earlier ones of the owner cannot write from here on.
            statement = (
                "insert into {} as t values (%s, 0, 1) on conflict (owner) "
                "do update set epoch = t.epoch + 1 returning token, epoch"
            )
            token, self._epoch = self._run(statement, owner).fetchone()
        return token

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Insert all rows in one transaction, with the token."""
        with self._db.transaction(), self._db.cursor() as cursor:
            if self._owner:
                self._db.execute(_LIMITS)
                update = "update {} set token = %s where owner = %s and epoch = %s"
                if self._run(update, token, self._owner, self._epoch).rowcount != 1:
                    raise Unavailable(
                        f"{self._owner} was opened elsewhere, and writes to {self._table} from "
                        "there"
                    )
            self._checks = False
            try:
                write_or_reject(
                    rows, lambda part: self._insert(cursor, part, part is rows), self._is_of_row
                )
            except Rejected as rejected:
                self._check_json_columns()
                self._retry_refused(cursor, rows, rejected.rows)
                reasons = rejected.rows.values()
                misfits = [reason for reason in reasons if reason.startswith(_MISFITS)]
                if len(misfits) == len(rows) >= _MIN_MISFITS:
                    raise Unavailable(
                        f"no row of a batch fits {self._table}: {misfits[0]}"
                    ) from None
                raise
            self._check_json_columns()

    def _retry_refused(self, cursor: Any, rows: Sequence[Row], refused: dict[int, str]) -> None:
        """Insert rows that were refused only because a later row was missing.

        They are removed from ``refused``. If no row is left there, the batch is retried.
        """
        before = len(refused) + 1
        while self._checks and len(refused) < before:
            before = len(refused)
            for index in sorted(refused, reverse=True):
                try:
                    self._insert(cursor, [rows[index]], False)
                except Exception as error:
                    if not self._is_of_row(error):
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
        sql = self._psycopg.sql
        return self._db.execute(sql.SQL(statement).format(sql.Identifier(_TOKENS)), values)

    def _is_of_row(self, error: Exception) -> bool:
        """True if a row may be the cause of the error, not the table or the server."""
        pg = self._psycopg
        if type(error).__name__ in _OF_ROW:
            return True
        if isinstance(error, pg.DataError | pg.IntegrityError | TypeError | ValueError):
            return True
        # A ProgrammingError with a state of the server is the table's fault; without one, a value
        # cannot be sent.
        return isinstance(error, pg.ProgrammingError) and getattr(error, "sqlstate", None) is None

    def _insert(self, cursor: Any, rows: Sequence[Row], is_batch: bool) -> None:
        """Insert rows; ``is_batch``: they are all rows of the batch."""
        key = self._key or ([] if self._owner else [_RECORD_ID])
        with self._db.transaction():
            for columns, same_columns in groupby(rows, lambda row: tuple(row.values)):
                names = list(columns)
                if _RECORD_ID in key and _RECORD_ID not in names:
                    names.append(_RECORD_ID)
                types = [self._json_type(name) for name in names]
                parameters: list[list[Any]] = []
                for row in same_columns:
                    values: list[Any] = []
                    for name, column_type in zip(names, types, strict=True):
                        values.append(self._value(row, name, column_type))
                    parameters.append(values)
                cursor.executemany(self._statement(names, key), parameters)
            # Checks that the commit would make. A row may need a later one, so parts are checked
            # only after the whole batch was.
            self._checks = self._checks or is_batch
            if self._checks:
                self._db.execute("set constraints all immediate; set constraints all deferred")

    def _value(self, row: Row, name: str, column_type: str | None) -> Any:
        if name not in row.values and row.id is None:
            raise InvalidRequest(
                f"rows for {self._table} have no id, so that a repeated one would be there twice: "
                "set record_id of the bolt, or the key of the sink to the columns of a unique "
                "constraint"
            )
        value = row.values.get(name, row.id)
        try:
            if column_type is not None:
                return self._json_parameter(value, column_type)
            if isinstance(value, dict):
                # Raises for a key that is a number, which psycopg would convert to text.
                json_text(value)
                return self._json(value)
        except NoJsonForm as error:
            kind = f" ({column_type})" if column_type else ""
            raise ValueError(f'column "{name}"{kind} of {self._table}: {error}') from None
        return value

    def _json_parameter(self, value: Any, column_type: str) -> Any:
        """Text, or a list of texts, which the statement casts to the type of the column."""
        if value is None:
            return None
        if not column_type.endswith("[]"):
            return self._json_text(value)
        if not isinstance(value, list | tuple):
            reason = f"an array takes a list, and the value is of type {type_name(value)}"
            raise NoJsonForm(f"{reason}: put it into a list")
        elements: list[str | None] = []
        for index, element in enumerate(value):
            try:
                elements.append(None if element is None else self._json_text(element))
            except NoJsonForm as error:
                error.path = f"[{index}]{error.path}"
                raise
        return elements

    def _json_text(self, value: Any) -> str:
        """JSON text of a value. In psycopg's wrappers ``None`` is null of JSON."""
        if not isinstance(value, self._json_wrappers):
            return json_text(value)
        if value.dumps is None:
            return json_text(value.obj)
        text = value.dumps(value.obj)
        return text.decode() if isinstance(text, bytes) else text

    def _read_json_columns(self) -> dict[str, str]:
        """Types of the columns that hold JSON; none if the table does not exist."""
        sql = self._psycopg.sql
        table = sql.Identifier(*self._table.split(".")).as_string(self._db)
        return dict(self._db.execute(_JSON_COLUMNS, [table]).fetchall())

    def _check_json_columns(self) -> None:
        """Check the types of the columns, which the rows' lock on the table now keeps.

        Raises :class:`Retry` if another session has changed them: the values were made for other
        types.
        """
        json_columns = self._read_json_columns()
        if json_columns != self._json_columns:
            self._json_columns = json_columns
            raise Retry(0.1, f"the columns of {self._table} have changed")

    def _json_type(self, name: Any) -> str | None:
        """The type of a column that holds JSON; ``None`` for any other column."""
        if not isinstance(name, str):
            # The statement refuses it, with its row.
            return None
        column = name.encode("utf-8", "replace")[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
        return self._json_columns.get(column)

    def _placeholder(self, name: str) -> Any:
        sql = self._psycopg.sql
        column_type = self._json_type(name)
        if column_type is None:
            return sql.Placeholder()
        # Without a cast a list of texts is text[], which the server does not convert.
        return sql.SQL("{}::pg_catalog." + column_type).format(sql.Placeholder())

    def _statement(self, names: Sequence[str], key: Sequence[str]) -> Any:
        sql = self._psycopg.sql
        comma = sql.SQL(", ")
        statement = sql.SQL("insert into {} ({}) values ({})").format(
            sql.Identifier(*self._table.split(".")),
            comma.join([sql.Identifier(name) for name in names]),
            comma.join([self._placeholder(name) for name in names]),
        )
        if not key:
            return statement
        key_columns = comma.join([sql.Identifier(name) for name in key])
        columns = [sql.Identifier(name) for name in names if name not in key]
        if not columns:
            return statement + sql.SQL(" on conflict ({}) do nothing").format(key_columns)
        updates = [sql.SQL("{0} = excluded.{0}").format(column) for column in columns]
        return statement + sql.SQL(" on conflict ({}) do update set {}").format(
            key_columns, comma.join(updates)
        )
