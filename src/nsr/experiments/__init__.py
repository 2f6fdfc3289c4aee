"""The paper's tables and figures as runs: functions with their expected time and number, one result a cell."""
