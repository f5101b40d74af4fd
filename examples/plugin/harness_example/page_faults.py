"""Count the page faults and the involuntary waits of a task, from its start in the worker to its last step.

Many minor faults are memory that was returned to the system and taken again; major ones were read from a disk.
"""

import resource

from harness import hookimpl


def counts():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"minor_faults": usage.ru_minflt, "major_faults": usage.ru_majflt, "preemptions": usage.ru_nivcsw}


@hookimpl(wrapper=True)
def harness_measure(task):
    before = counts()
    record = yield
    counted = {name: count - before[name] for name, count in counts().items()}
    return record.model_copy(update={"extra": {**record.extra, **counted}})
