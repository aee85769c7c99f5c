"""The command line, ``storm-dagster VERB``."""

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with the code of its outcome."""
    from storm_dagster.host.imports import quick_imports

    with quick_imports():
        from storm_dagster.cli.app import run

    run()
