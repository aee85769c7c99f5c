"""The GraphQL documents that nimbus sends to Dagster's webserver."""

from __future__ import annotations

ADD_PARTITION = """
mutation StormAddPartition($selector: RepositorySelector!, $definition: String!, $key: String!) {
  addDynamicPartition(repositorySelector: $selector, partitionsDefName: $definition, partitionKey: $key) {
    __typename
    ... on PythonError { message }
    ... on UnauthorizedError { message }
  }
}
"""

DROP_PARTITION = """
mutation StormDropPartition($selector: RepositorySelector!, $definition: String!, $keys: [String!]!) {
  deleteDynamicPartitions(repositorySelector: $selector, partitionsDefName: $definition, partitionKeys: $keys) {
    __typename
    ... on PythonError { message }
    ... on UnauthorizedError { message }
  }
}
"""

LAUNCH = """
mutation StormLaunchRun($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on RunConfigValidationInvalid { errors { message } }
    ... on PythonError { message }
    ... on InvalidStepError { invalidStepKey }
    ... on InvalidOutputError { stepKey invalidOutputName }
    ... on PipelineNotFoundError { message }
    ... on RunConflict { message }
    ... on InvalidSubsetError { message }
    ... on PresetNotFoundError { message }
    ... on ConflictingExecutionParamsError { message }
    ... on NoModeProvidedError { message }
    ... on UnauthorizedError { message }
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
        loadStatus
        locationOrLoadError {
          __typename
          ... on RepositoryLocation { repositories { name } }
          ... on PythonError { message }
        }
      }
    }
    ... on PythonError { message }
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
      startTime
      endTime
      stepKeysToExecute
      executionPlan { steps { key } }
      stepStats { stepKey status startTime endTime }
    }
    ... on PythonError { message }
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
            error { message className cause { message className cause { message className } } }
            failureMetadata {
              description
              metadataEntries { label ... on TextMetadataEntry { text } }
            }
          }
          ... on RunFailureEvent { message error { message className } }
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
    ... on Runs { results { runId status jobName } }
    ... on InvalidPipelineRunsFilterError { message }
    ... on PythonError { message }
  }
}
"""

REPORT = """
mutation StormReport($params: ReportRunlessAssetEventsParams!) {
  reportRunlessAssetEvents(eventParams: $params) {
    __typename
    ... on PythonError { message }
    ... on UnauthorizedError { message }
  }
}
"""
