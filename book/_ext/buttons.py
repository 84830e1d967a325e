"""Sphinx extension: the buttons that lead to the public repository, which are there only when it is.

`repository.url` in _config.yml is the one place that knows the address. Empty, as long as there is none: no page leads
to a repository, to Binder or to Colab. Set: every page has a button to the repository, every notebook to the other two.
"""

from __future__ import annotations

from typing import Any

LAUNCHERS = {"binderhub_url": "https://mybinder.org", "colab_url": "https://colab.research.google.com"}


def set_theme_options(app: Any, config: Any) -> None:
    address = config.html_theme_options["repository_url"]  # scripts/address.py looks at its form
    launchers = LAUNCHERS if address else dict.fromkeys(LAUNCHERS, "")
    config.html_theme_options.update(
        use_repository_button=bool(address),
        launch_buttons={"notebook_interface": "jupyterlab", "thebe": False, **launchers},
    )


def setup(app: Any) -> dict[str, bool]:
    app.connect("config-inited", set_theme_options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
