"""What the HTTP services of nimbus and supervisors share: serving, guarding, log files, their description."""
