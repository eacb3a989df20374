import pytest

from twinhull.deploy.scale import effective, scaled
from twinhull.system.model import Launch, Pool, System, Train


def system(pool: Pool, train: Train | None = None) -> System:
    job = train or Train(kind="train", run="app:fit", pool="p")
    return System(name="s", pools={"p": pool}, components={"fit": job})


def test_sixteen_gpus_become_a_rank_a_core_and_that_is_said() -> None:
    local = scaled(system(Pool(nodes="2", gpus="8 x H100")), num_cores=2, ranks=None, workers=None)
    assert local.ranks == {"fit": 2}
    assert "fit: ranks 16 -> 2 on 2 cores" in local.notes


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (Pool(nodes="1", cpus=4), 4),
        (Pool(nodes="2..8", gpus="1 x L4"), 2),
        (Pool(nodes="1"), 1),
        (Pool(gpus="H100"), 1),
        (Pool(nodes="1", gpus="0", cpus=2), 2),
    ],
    ids=["cores", "gpus of the least nodes", "nothing known", "count unknown", "no gpus"],
)
def test_ranks_come_from_gpus_else_from_cores(pool: Pool, said: int) -> None:
    assert scaled(system(pool), num_cores=64, ranks=None, workers=None).ranks == {"fit": said}


def test_the_file_s_own_number_of_processes_wins() -> None:
    job = Train(kind="train", run="app:fit", pool="p", launch=Launch(processes=3))
    assert scaled(system(Pool(nodes="2", cpus=8), job), num_cores=64, ranks=None, workers=None).ranks == {
        "fit": 6
    }


def test_options_win_over_cores() -> None:
    local = scaled(system(Pool(nodes="9", cpus=1)), num_cores=2, ranks=4, workers=3)
    assert (local.ranks, local.workers, local.notes) == ({"fit": 4}, {"p": 3}, ())


def test_the_effective_system_tells_the_numbers_of_this_machine() -> None:
    whole = system(Pool(nodes="2", gpus="8 x H100"))
    local = scaled(whole, num_cores=2, ranks=None, workers=None)
    here = effective(whole, local)
    job = here.components["fit"]
    assert isinstance(job, Train)
    assert job.launch is not None
    assert job.launch.processes == 2
    again = scaled(here, num_cores=2, ranks=None, workers=None)
    assert again.ranks == local.ranks


@pytest.mark.parametrize(
    ("pool", "elastic", "hosts"),
    [
        (Pool(nodes="4", gpus="8 x H100"), None, "4"),
        (Pool(nodes="4", gpus="8 x H100"), "2..4", "2..4"),
        (Pool(nodes="1", gpus="8 x H100"), "1..3", "1..3"),
        (Pool(nodes="4", gpus="8 x H100"), "2..", "2..4"),
    ],
)
def test_a_job_of_several_nodes_is_left_to_machines_that_join(
    pool: Pool, elastic: str | None, hosts: str
) -> None:
    job = Train(kind="train", run="app:fit", pool="p", elastic=elastic)
    whole = system(pool, job)
    local = scaled(whole, num_cores=2, ranks=None, workers=None, joined=True)
    assert {name: str(nodes) for name, nodes in local.hosts.items()} == {"fit": hosts}
    assert local.ranks == {}
    assert effective(whole, local).components["fit"] == job
    assert effective(whole, local).pools == whole.pools


def test_a_job_of_one_node_trains_here_though_machines_may_join() -> None:
    local = scaled(system(Pool(nodes="1", cpus=2)), num_cores=2, ranks=None, workers=None, joined=True)
    assert (local.ranks, local.hosts) == ({"fit": 2}, {})
