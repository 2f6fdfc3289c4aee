"""The paper's tables and figures as runs: each a function with its expected time and number, writing one result a cell."""
