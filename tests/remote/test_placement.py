"""Where sandboxes go: the same order everywhere, few moves when nodes come and go, bounded load."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from skyenv.remote.placement import ALLOWANCE, FACTOR, NEAR, Seats, order

names = st.text(st.sampled_from("abcdefghij0123456789-"), min_size=1, max_size=12)
seats = st.builds(
    Seats,
    name=names,
    slots=st.integers(1, 64),
    used=st.integers(0, 64),
    queued=st.integers(0, 9),
    images=st.frozensets(st.sampled_from(["a", "b", "c"])),
)
fleets = st.lists(seats, min_size=1, max_size=9, unique_by=lambda node: node.name)
idle = st.lists(names, min_size=2, max_size=9, unique=True).map(lambda all_of: [Seats(name, 64) for name in all_of])
IMAGES = [f"registry/image-{number}" for number in range(600)]


def first(key: str, nodes: list[Seats]) -> str:
    return order(key, nodes)[0].name


@given(fleets, st.sampled_from(["a", "b", "c"]), st.randoms())
def test_the_order_holds_every_node_once_and_does_not_depend_on_theirs(nodes, image, random) -> None:
    once = order(image, nodes, image)
    assert sorted(node.name for node in once) == sorted(node.name for node in nodes)
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert order(image, shuffled, image) == once


@given(idle, st.integers(0, 8))
def test_a_node_that_leaves_moves_only_its_own_images(nodes, index) -> None:
    gone = nodes[index % len(nodes)]
    rest = [node for node in nodes if node is not gone]
    for image in IMAGES[:60]:
        before = first(image, nodes)
        assert before == gone.name or first(image, rest) == before


@given(idle, names)
def test_a_node_that_comes_takes_images_and_moves_none_between_others(nodes, name) -> None:
    if any(node.name == name for node in nodes):
        return
    more = [*nodes, Seats(name, 64)]
    for image in IMAGES[:60]:
        assert first(image, more) in (name, first(image, nodes))


def test_from_eight_to_nine_nodes_about_a_ninth_of_the_images_move() -> None:
    eight = [Seats(f"node-{number}", 64) for number in range(8)]
    nine = [*eight, Seats("node-8", 64)]
    moved = sum(first(image, eight) != first(image, nine) for image in IMAGES)
    assert 0 < moved <= len(IMAGES) * (1 / 9 + 0.04)


def test_shares_follow_slots() -> None:
    nodes = [Seats("small", 16), Seats("large", 48)]
    on_large = sum(first(image, nodes) == "large" for image in IMAGES) / len(IMAGES)
    assert abs(on_large - 0.75) < 0.06


@given(fleets, st.sampled_from(["a", "b", "c"]))
def test_full_nodes_come_last_and_overloaded_ones_before_them(nodes, image) -> None:
    total, slots = sum(node.used for node in nodes) + 1, sum(node.slots for node in nodes)

    def rank(node: Seats) -> int:
        if node.used >= node.slots:
            return 2
        return int(node.used >= max(ALLOWANCE, FACTOR * total / slots) * node.slots)

    ranks = [rank(node) for node in order(image, nodes, image)]
    assert ranks == sorted(ranks)


@given(idle, st.data())
def test_a_node_nearby_that_holds_the_image_is_preferred(nodes, data) -> None:
    ranked = order("a", nodes, "a")
    lucky = data.draw(st.sampled_from(ranked[:NEAR]))
    holding = [replace(node, images=frozenset(["a"])) if node == lucky else node for node in nodes]
    assert order("a", holding, "a")[0].name == lucky.name


@given(idle, st.integers(1, 200))
def test_one_image_spreads_once_its_node_has_its_share(nodes, sandboxes) -> None:
    """However many sandboxes of one image start, no node is full while another is nearly empty."""
    load = {node.name: 0 for node in nodes}
    for _each in range(min(sandboxes, 64 * len(nodes))):
        now = [replace(node, used=load[node.name]) for node in nodes]
        load[order("one", now, "one")[0].name] += 1
    average = sum(load.values()) / len(load)
    assert max(load.values()) <= max(ALLOWANCE * 64, FACTOR * (average + 1)) + 1
