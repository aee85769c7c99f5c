"""Requests of HTTP and Thrift: submissions, lifecycle changes, reads."""
