"""The GraphQL documents that nimbus sends to Dagster's webserver."""

from __future__ import annotations

ADD_PARTITION = """
mutation StormAddPartition($selector: RepositorySelector!, $definition: String!, $key: String!) {
  addDynamicPartition(repositorySelector: $selector, partitionsDefName: $definition, partitionKey: $key) {
    __typename
    ... on Error { message }
  }
}
"""

DROP_PARTITION = """
mutation StormDropPartition($selector: RepositorySelector!, $definition: String!, $keys: [String!]!) {
  deleteDynamicPartitions(repositorySelector: $selector, partitionsDefName: $definition, partitionKeys: $keys) {
    __typename
    ... on Error { message }
  }
}
"""

LAUNCH = """
mutation StormLaunchRun($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on RunConfigValidationInvalid { errors { message } }
    ... on Error { message }
  }
}
"""

LOCATIONS = """
query StormLocations {
  workspaceOrError {
    __typename
    ... on Workspace {
      locationEntries {
        name
        locationOrLoadError {
          __typename
          ... on RepositoryLocation { repositories { name } }
          ... on PythonError { message }
        }
      }
    }
    ... on Error { message }
  }
}
"""

RUN = """
query StormRun($id: ID!) {
  runOrError(runId: $id) {
    __typename
    ... on Run {
      runId
      status
      jobName
      stepKeysToExecute
      executionPlan { steps { key } }
      stepStats { stepKey status startTime endTime }
    }
    ... on Error { message }
  }
}
"""

FAILURES = """
query StormRunFailures($id: ID!, $cursor: String) {
  runOrError(runId: $id) {
    __typename
    ... on Run {
      eventConnection(afterCursor: $cursor, limit: 1000) {
        cursor
        hasMore
        events {
          __typename
          ... on ExecutionStepFailureEvent {
            stepKey
            error { message cause { message cause { message } } }
            failureMetadata {
              description
              metadataEntries { label ... on TextMetadataEntry { text } }
            }
          }
          ... on RunFailureEvent { message error { message } }
          ... on RunCanceledEvent { message }
        }
      }
    }
  }
}
"""

FIND_RUNS = """
query StormFindRuns($filter: RunsFilter!, $limit: Int!) {
  runsOrError(filter: $filter, limit: $limit) {
    __typename
    ... on Runs { results { runId status } }
    ... on Error { message }
  }
}
"""

REPORT = """
mutation StormReport($params: ReportRunlessAssetEventsParams!) {
  reportRunlessAssetEvents(eventParams: $params) {
    __typename
    ... on Error { message }
  }
}
"""
