"""PostgreSQL as a sink."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from storm_dagster.connectors.settings import assets_of, client_library, client_settings
from storm_dagster.connectors.sinks import Rejected, Retry, Row, write_or_reject
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.json_text import NoJsonForm, json_text, type_name

_MIN_MISFITS = 10
"""Number of rows, all of which do not fit, from which on the table is at fault."""
_MISFIT_ERRORS = ("DatatypeMismatch", "UndefinedColumn", "SyntaxError", "GeneratedAlways")
"""Names of psycopg's errors of a row that does not fit the columns, or of any row."""
_ROW_ERRORS = (*_MISFIT_ERRORS, "ProgramLimitExceeded", "RaiseException")
"""Names of psycopg's errors that a row may cause, beside the classes in ``_is_row_error``."""
_RECORD_ID = "record_id"
"""Column of a row's id, unless the row has a field of this name."""
_TOKENS_TABLE = "storm_sink_tokens"
"""Table with a row for each owner: the token of its last batch, and its epoch."""
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
"""Query for the columns of a table that hold JSON, with their types without domains around them.

It includes arrays by the type of their elements, since an array of ``jsonb`` has values of JSON,
too. Users that may only insert into the table can read the catalog.
"""
_MAX_NAME_BYTES = 63
"""PostgreSQL truncates a longer name."""
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
        self._json_columns: dict[str, str] = {}
        """Columns that hold JSON -> type, such as ``jsonb`` or ``json[]``."""

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect, and return the owner's token; ``None`` without an owner.

        Waits for the end of an earlier transaction of the owner, at most ten seconds.
        """
        with client_library("postgres"):
            import psycopg
            from psycopg import sql
            from psycopg.types.json import Json, Jsonb
        self._psycopg = psycopg
        self._sql: Any = sql
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
                self._insert(cursor, part, part is rows)

            try:
                write_or_reject(rows, insert, self._is_row_error)
            except Rejected as rejected:
                self._check_json_columns()
                self._retry_refused(cursor, rows, rejected.rows)
                reasons = rejected.rows.values()
                misfits = [reason for reason in reasons if reason.startswith(_MISFIT_ERRORS)]
                if len(misfits) == len(rows) >= _MIN_MISFITS:
                    # If no row fits, the table is at fault.
                    raise Unavailable(
                        f"no row of a batch fits {self._table}: {misfits[0]}"
                    ) from None
                raise
            self._check_json_columns()

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
        # With an owner no row is written twice, so that it replaces none.
        key = self._key or ([] if self._owner else [_RECORD_ID])
        with self._db.transaction():
            # A statement for each run of rows with the same fields.
            for fields, same_fields in groupby(rows, lambda row: tuple(row.values)):
                names = list(fields)
                if _RECORD_ID in key and _RECORD_ID not in fields:
                    names.append(_RECORD_ID)
                types = {name: self._json_type(name) for name in names}
                lines = [self._values(row, types) for row in same_fields]
                cursor.executemany(self._statement(names, key), lines)
            # These checks fail as the commit would. A row may need a later one: parts are checked
            # only if all rows fail.
            self._checks_constraints = self._checks_constraints or is_batch
            if self._checks_constraints:
                self._db.execute("set constraints all immediate; set constraints all deferred")

    def _values(self, row: Row, types: Mapping[str, str | None]) -> list[Any]:
        return [self._value(row, name, column_type) for name, column_type in types.items()]

    def _value(self, row: Row, name: str, column_type: str | None) -> Any:
        """The parameter of the statement for a column of a row.

        ``column_type`` is that of a column that holds JSON, else ``None``. The row's id is the
        value of a column that the row lacks. Raises ``ValueError`` for a value without a form in
        JSON, and :class:`InvalidRequest` for a row without an id.
        """
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
                # Only to check it: psycopg would convert a key that is a number to text.
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
        sql = self._sql
        table = sql.Identifier(*self._table.split(".")).as_string(self._db)
        return dict(self._db.execute(_JSON_COLUMNS, [table]).fetchall())

    def _check_json_columns(self) -> None:
        """Read the types once more, while the rows' lock on the table prevents a change.

        Raises :class:`Retry` if another session has changed them: the values were encoded for other
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
        sql = self._sql
        column_type = self._json_type(name)
        if column_type is None:
            return sql.Placeholder()
        # Without a cast a list of texts is text[], which the server does not convert.
        return sql.SQL("{}::pg_catalog." + column_type).format(sql.Placeholder())

    def _statement(self, names: Sequence[str], key: Sequence[str]) -> Any:
        """The statement that inserts these columns, or updates the row with the same key."""
        sql = self._sql
        comma = sql.SQL(", ")
        update = sql.SQL("{0} = excluded.{0}")
        updates = [update.format(sql.Identifier(name)) for name in names if name not in key]
        text = "insert into {table} ({columns}) values ({placeholders})"
        if key:
            action = "do update set {updates}" if updates else "do nothing"
            text += f" on conflict ({{key}}) {action}"
        return sql.SQL(text).format(
            table=sql.Identifier(*self._table.split(".")),
            columns=comma.join([sql.Identifier(name) for name in names]),
            placeholders=comma.join([self._placeholder(name) for name in names]),
            key=comma.join([sql.Identifier(name) for name in key]),
            updates=comma.join(updates),
        )
