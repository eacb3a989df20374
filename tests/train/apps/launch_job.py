"""The launcher of a job given as JSON: what `supervise.launch` does after it has read the file.

`launch_job.py JOB EVERY_S RANKS [LISTEN LOW HIGH LEASE_S]`
"""

import os
import sys
from pathlib import Path

from twinhull import logs, processes
from twinhull.errors import TwinhullError
from twinhull.train.job import Job
from twinhull.train.supervise.crew import Size
from twinhull.train.supervise.launch import Alone, Launcher
from twinhull.train.supervise.workload import Workload

processes.die_with_parent()
if group := os.environ.get("CGROUP"):
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
job = Job.from_json(sys.argv[1])
logs.setup(f"train:{job.name}")
notice = os.environ.get("NOTICE", "")
walltime_s = float(os.environ.get("WALLTIME_S", "0")) or None
workload = Workload(job, float(sys.argv[2]) or None, walltime_s, notice)
try:
    if len(sys.argv) > 4:
        from twinhull.train.supervise.door import opened

        listen, low, high, lease_s = sys.argv[4:]
        crew = opened(workload, listen, float(lease_s), 5)
        code = Launcher(workload, Size(int(low), int(high)), crew).run()
    else:
        code = Launcher(workload, Size(), Alone(workload, int(sys.argv[3]), nice=5)).run()
except TwinhullError as error:
    print(error)
    code = error.exit_code
sys.stdout.flush()
os._exit(code)
