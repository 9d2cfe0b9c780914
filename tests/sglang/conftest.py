"""Servers start last: what fails without one fails first."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)
