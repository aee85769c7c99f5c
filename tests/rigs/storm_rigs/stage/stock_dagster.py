"""A user's own Dagster: `dagster dev` or `dg dev`, with webserver, daemon and a queue."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
from typing_extensions import Self

from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.child import await_child, start_child, stop_child

_SHOWN = """query($selector: RepositorySelector!) { repositoryOrError(repositorySelector: $selector) {
  __typename ... on Repository {
    jobs { name } schedules { name cronSchedule scheduleState { status } } sensors { name sensorState { status } }
    allTopLevelResourceDetails { name resourceType } assetNodes { assetKey { path } } } } }"""
_TICKS = """query($selector: ScheduleSelector!) { scheduleOrError(scheduleSelector: $selector) {
  __typename ... on Schedule { scheduleState { ticks(limit: 500) { timestamp status runIds skipReason } } } } }"""
_LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_RELOAD = """mutation($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) {
  __typename ... on WorkspaceLocationEntry { locationOrLoadError { __typename ... on PythonError { message } } } } }"""


class StockDagster:
    """`dagster dev -m MODULE` in ``root``; a context manager that ends it with all its processes.

    A ``command`` such as ``("dg", "dev")`` is started instead, if the project's code location is
    ``module``. ``home`` becomes its ``DAGSTER_HOME``, with ``settings`` as `dagster.yaml`; without
    them there is no such file.
    """

    def __init__(
        self,
        root: Path,
        module: str,
        home: Path,
        settings: str = "",
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.root, self.module, self.home = root, module, home
        home.mkdir()
        if settings:
            (home / "dagster.yaml").write_text(settings, encoding="utf-8")
        self.port = free_port()
        self.instance = dg.DagsterInstance.from_config(str(home))
        self._env = dict(env or {})
        self._command = list(command) or ["dagster", "dev", "-m", module]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        program, *arguments = self._command
        argv = [str(Path(sys.executable).with_name(program)), *arguments]
        argv += ["--host", "127.0.0.1", "--port", str(self.port)]
        env = {"DAGSTER_HOME": str(self.home), "DAGSTER_DISABLE_TELEMETRY": "yes", **self._env}
        self._process = start_child(
            argv, self.log, env=env, without=["STORM_DAGSTER_HOME"], cwd=self.root, own_session=True
        )
        try:
            # A webserver and its code location on a machine that runs other things too.
            ignore = (httpx.HTTPError, AssertionError)
            await_child(
                self._process, self.log, self.shown, 240, "the stock Dagster", ignore=ignore
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        assert process is not None
        # `dg dev` waits for its children when it gets TERM. Both end at Ctrl-C.
        stop_child(process, 40, signal.SIGINT)
        self.instance.dispose()

    @property
    def log(self) -> Path:
        """Its output."""
        return self.home.with_name(f"{self.home.name}-dev.log")

    @property
    def url(self) -> str:
        """GraphQL URL."""
        return f"http://127.0.0.1:{self.port}/graphql"

    @property
    def selector(self) -> dict[str, str]:
        """Selector of the code location's repository."""
        return {"repositoryLocationName": self.module, "repositoryName": "__repository__"}

    def ask(self, query: str, **variables: Any) -> Any:
        """The result of a GraphQL request of one field."""
        document = {"query": query, "variables": variables}
        answer = httpx.post(self.url, json=document, timeout=120, trust_env=False).json()
        (result,) = answer["data"].values()
        return result

    def shown(self) -> dict[str, Any]:
        """Definitions of the code location in the webserver, by kind."""
        found = self.ask(_SHOWN, selector=self.selector)
        assert found["__typename"] == "Repository", found
        return {
            "jobs": {job["name"]: True for job in found["jobs"]},
            "schedules": {
                each["name"]: (each["cronSchedule"], each["scheduleState"]["status"])
                for each in found["schedules"]
            },
            "sensors": {each["name"]: each["sensorState"]["status"] for each in found["sensors"]},
            "resources": {
                each["name"]: each["resourceType"] for each in found["allTopLevelResourceDetails"]
            },
            "assets": {"/".join(node["assetKey"]["path"]): True for node in found["assetNodes"]},
        }

    def reload(self) -> None:
        """The button `Reload definitions`."""
        result = self.ask(_RELOAD, name=self.module)
        assert result["locationOrLoadError"]["__typename"] == "RepositoryLocation", result

    def ticks(self, schedule: str) -> list[dict[str, Any]]:
        """Ticks of a schedule, newest first."""
        found = self.ask(_TICKS, selector={**self.selector, "scheduleName": schedule})
        return found["scheduleState"]["ticks"]

    def launch(self, job: str, **tags: str) -> str:
        """Launch a job as the launchpad does; its run id."""
        result = self.ask(
            _LAUNCH,
            params={
                "selector": {**self.selector, "jobName": job},
                "executionMetadata": {"tags": [{"key": k, "value": v} for k, v in tags.items()]},
            },
        )
        assert result["__typename"] == "LaunchRunSuccess", result
        return result["run"]["runId"]

    def wait_success(self, run_id: str, timeout: float = 420.0) -> None:
        """Wait for the end of a run, which must be a success."""

        def ended() -> dg.DagsterRun | None:
            run = self.instance.get_run_by_id(run_id)
            return run if run is not None and run.is_finished else None

        run = eventually(ended, timeout, f"the end of run {run_id}", interval=0.5)
        assert run.is_success, [entry.user_message for entry in self.instance.all_logs(run_id)][
            -10:
        ]

    def run(self, job: str, **tags: str) -> Counter[str]:
        """Launch it and wait for its success: what it left in the event log."""
        run_id = self.launch(job, **tags)
        self.wait_success(run_id)
        return self.events(run_id)

    def events(self, run_id: str) -> Counter[str]:
        """Events of a run by type; what the engine says of itself is left out."""
        return Counter(
            entry.dagster_event.event_type_value
            for entry in self.instance.all_logs(run_id)
            if entry.dagster_event is not None
            and entry.dagster_event.event_type_value != "ENGINE_EVENT"
        )

    def made(self, key: dg.AssetKey) -> int:
        """Materializations of an asset."""
        return len(self.instance.fetch_materializations(key, limit=1000).records)
