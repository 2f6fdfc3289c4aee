"""The sweep's engine over many machines: each run is a Ray task, retried by Ray when its worker is lost."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from nsr.experiments.sweep import Ended, Engine, Make, Task, is_loss


def ray_engine(
    address: str | None = None, *, cpus: float = 1.0, gpus: float = 0.0, retries: int = 2, workers: int | None = None
) -> Engine:
    """Runs on a Ray cluster. Results and outputs must lie in a folder that all machines share.

    Args:
        address: The cluster's; ``None`` starts one on this machine for the time of the sweep.
        cpus: Cores that a run needs.
        gpus: GPUs that a run needs; a fraction shares one.
        retries: How often a lost run is started again.
        workers: With ``address=None``, the number of cores that the cluster is given; by default all.

    Raises:
        ValueError: Ray is not installed, or the cluster cannot be reached.
    """
    if find_spec("ray") is None:
        raise ValueError("The engine ray needs Ray, which is not installed: pip install 'nsr[cluster]'.")

    def engine(tasks: Sequence[Task], make: Make) -> Iterator[Ended]:
        import ray

        started = not ray.is_initialized()
        if started:
            try:
                ray.init(
                    address=address or "local",
                    num_cpus=None if address else workers,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
            except ConnectionError as error:
                raise ValueError(
                    f"There is no Ray cluster at {address} ({error}). Start one: ray start --head."
                ) from error
        try:
            yield from _ended(tasks, make)
        finally:
            if started:
                ray.shutdown()

    def _ended(tasks: Sequence[Task], make: Make) -> Iterator[Ended]:
        import ray

        def call(task: Task) -> int:
            return make(task)

        # max_calls=1: a new process for each run, as on one machine
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1, max_retries=0)(call)
        pending = {remote.options(name=task.name).remote(task): (task, 1) for task in tasks}
        while pending:
            for reference in ray.wait(list(pending), num_returns=1)[0]:
                task, attempt = pending.pop(reference)
                try:
                    code = ray.get(reference)
                except (
                    ray.exceptions.WorkerCrashedError,
                    ray.exceptions.NodeDiedError,
                    ray.exceptions.OutOfMemoryError,
                ):
                    code = -9
                if is_loss(code) and attempt <= retries:
                    pending[remote.options(name=task.name).remote(task)] = task, attempt + 1
                else:
                    yield Ended(task, code, attempt)

    return engine
