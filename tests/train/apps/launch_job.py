"""The launcher of a job given as JSON: what `twinhull.train.launch` does after it has read the file."""

import os
import sys

from twinhull import logs, processes
from twinhull.train.job import Job
from twinhull.train.launch import Launcher

processes.die_with_parent()
job = Job.from_json(sys.argv[1])
logs.setup(f"train:{job.name}")
every_s = float(sys.argv[2]) or None
code = Launcher(job, every_s, int(sys.argv[3]), nice=5).run()
os._exit(code)
