"""What an operator gets wrong: docker/setup or the container ends with one line that names the
thing and the remedy.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from containers import ROOT, Containers, Failure

IMAGE = "storm-dagster:0.1.0"
HOME = "/var/lib/storm_dagster"
SECRET = "/run/secrets/storm_secret"
NIMBUS = ("storm-dagster", "daemon", "nimbus", "-c", "storm.local.hostname=127.0.0.1")


def last_line(made: Containers, *options: str, command: tuple[str, ...] = NIMBUS) -> str:
    """The one line with which a container of these options ends; :class:`Failure` if it says more,
    or goes on.
    """
    name = "storm-dagster-test-bad-input"
    environment = ("--env", f"WRITES={HOME}", "--env", f"READS={SECRET}")
    text = made.docker(
        "run", "--rm", "--name", name, *environment, *options, IMAGE, *command, check=False
    )
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1:
        made.docker("rm", "--force", name, check=False)
        raise Failure(f"{options} ends with {len(lines)} lines: {text[-2000:]}")
    return lines[0]


def expect(line: str, *parts: str) -> None:
    """:class:`Failure` unless the line has all parts."""
    lacking = [part for part in parts if part not in line]
    if lacking:
        raise Failure(f"{line!r} does not say {lacking}")


def setup_line(folder: Path, secret: str) -> str:
    """What docker/setup says of a secret."""
    env = {
        **os.environ,
        "SECRETS": str(folder / "none"),
        "TOPOLOGIES": str(folder / "none"),
        "STORM_SECRET": secret,
    }
    done = subprocess.run(
        [str(ROOT / "docker" / "setup")], env=env, text=True, timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip
    if done.returncode != 2 or len(done.stdout.splitlines()) != 1:
        raise Failure(
            f"docker/setup with the secret {secret!r} ended with {done.returncode}: {done.stdout}"
        )
    return done.stdout


def certificates(made: Containers, folder: Path) -> None:
    """A certificate and the key of another one."""
    for name in ("one", "other"):
        made.command(
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", "/CN=nimbus1", "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"), timeout=60,
        )  # fmt: skip


def check_all(made: Containers, say: Callable[[str], None]) -> None:
    """Every case that needs no cluster."""
    folder = made.folder / "bad"
    folder.mkdir(mode=0o755)
    expect(setup_line(folder, ""), "there is no secret", "STORM_SECRET=$(openssl rand -hex 32)")
    expect(setup_line(folder, "short"), "the secret is weak", "openssl rand -hex 32")
    expect(setup_line(folder, "a" * 64), "the secret is weak")
    good = f"{made.folder}/secrets/storm_secret:{SECRET}:ro"
    expect(last_line(made), SECRET, "is missing", "docker/setup")
    certificates(made, folder)
    (folder / "weak").write_text("too short\n")
    (folder / "empty").write_text("")
    (folder / "root").mkdir(mode=0o755)
    (folder / "tls.yaml").write_text(
        f"storm.secret.file: {SECRET}\n"
        "storm.tls.cert: /tls/one.pem\nstorm.tls.key: /tls/other.key\nstorm.tls.ca: /tls/one.pem\n"
    )
    (folder / "plain.yaml").write_text(f"storm.secret.file: {SECRET}\n")
    own = ("weak", "empty", "one.pem", "one.key", "other.key")
    made.docker(
        "run", "--rm", "--user", "0", "--entrypoint", "sh", "--volume", f"{folder}:/tls", IMAGE,
        "-c", " && ".join(f"chown 10001 /tls/{name} && chmod 400 /tls/{name}" for name in own),
    )  # fmt: skip
    conf = ("--volume", f"{folder}/plain.yaml:{HOME}/storm.yaml:ro")
    expect(
        last_line(made, "--volume", f"{folder}/empty:{SECRET}:ro"),
        SECRET,
        "is empty",
        "docker/setup",
    )
    weak = last_line(made, *conf, "--volume", f"{folder}/weak:{SECRET}:ro")
    expect(weak, "storm.secret", "fewer than 16 characters", "openssl rand -hex 32")
    unwritable = last_line(made, "--volume", good, "--volume", f"{folder}/root:{HOME}")
    expect(unwritable, HOME, "cannot be written", "chown 10001")
    wrong = last_line(
        made,
        "--volume",
        good,
        "--volume",
        f"{folder}/tls.yaml:{HOME}/storm.yaml:ro",
        "--volume",
        f"{folder}:/tls:ro",
    )
    expect(wrong, "storm.tls.cert", "PEM files that belong together")
    say(
        "a missing, empty or weak secret, an unwritable volume and a wrong certificate end with one line each"
    )


def check_port(made: Containers, say: Callable[[str], None]) -> None:
    """A nimbus whose port another one has."""
    line = last_line(
        made, "--network", f"container:{made.name('nimbus1')}",
        "--volume", f"{made.folder}/secrets/storm_secret:{SECRET}:ro",
        "--volume", f"{ROOT}/docker/storm.yaml:{HOME}/storm.yaml:ro",
        command=("storm-dagster", "daemon", "nimbus", "-c", "storm.local.hostname=nimbus1"),
    )  # fmt: skip
    expect(line, "port", "is taken by another process")
    say("a port in use ends a nimbus with one line")
