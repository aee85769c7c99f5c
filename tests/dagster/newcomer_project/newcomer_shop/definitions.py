"""A project that knows nothing of Storm: an executor and a `spark` of its own, jobs, schedules,
eager assets.
"""

import dagster as dg


class Spark(dg.ConfigurableResource):
    """The one that the project has always had."""

    master: str = "local[1]"


DAYS = dg.DailyPartitionsDefinition("2024-01-01", end_date="2024-01-04")


@dg.asset
def prices(spark: Spark) -> int:
    return len(spark.master)


@dg.asset(deps=[prices], automation_condition=dg.AutomationCondition.eager())
def price_report() -> None: ...


@dg.asset(deps=[["topologies", "clicks"]], automation_condition=dg.AutomationCondition.eager())
def clicks_report() -> None: ...


@dg.asset(partitions_def=DAYS)
def daily(context: dg.AssetExecutionContext) -> str:
    return context.partition_key


@dg.op
def collect() -> int:
    return 1


@dg.op
def deliver(count: int) -> None:
    assert count == 1


@dg.job
def nightly() -> None:
    deliver(collect())


@dg.job
def tidy() -> None:
    collect()


defs = dg.Definitions(
    assets=[prices, price_report, clicks_report, daily],
    jobs=[
        nightly,
        tidy,
        dg.define_asset_job("prices_job", dg.AssetSelection.assets(prices)),
        dg.define_asset_job("daily_job", dg.AssetSelection.assets(daily)),
    ],
    schedules=[
        dg.ScheduleDefinition(
            job=tidy, cron_schedule="* * * * *", default_status=dg.DefaultScheduleStatus.RUNNING
        ),
        dg.ScheduleDefinition(job=nightly, cron_schedule="0 3 * * *"),
    ],
    sensors=[
        dg.AutomationConditionSensorDefinition(
            "automation",
            target=dg.AssetSelection.all(),
            default_status=dg.DefaultSensorStatus.RUNNING,
            minimum_interval_seconds=5,
        )
    ],
    resources={"spark": Spark()},
    executor=dg.multiprocess_executor.configured({"max_concurrent": 2}, name="ours"),
)
