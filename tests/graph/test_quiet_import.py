import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


def test_the_graph_side_imports_without_a_warning() -> None:
    done = run("import nsr; nsr.graph; nsr.attach")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
