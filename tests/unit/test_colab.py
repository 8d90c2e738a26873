"""What the set-up cell does in Colab: the packages its kernel stands on stay as they are."""

import json

from minillm.course.build import colab


def test_colab_keeps_the_packages_its_kernel_stands_on():
    kept = dict(line.split("==") for line in colab.keep_versions())
    import numpy
    import torch

    assert kept["numpy"] == numpy.__version__ and kept["torch"] == torch.__version__
    assert {"ipython", "ipywidgets"} <= kept.keys()


def test_colab_installs_a_clone_once(tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    info = tmp_path / "site" / "minillm_course-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: minillm-course\nVersion: 9\n", encoding="utf-8")
    (info / "direct_url.json").write_text(json.dumps({"url": clone.as_uri()}), encoding="utf-8")
    assert colab.needs_install(str(clone))
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert not colab.needs_install(str(clone))
    assert colab.needs_install(str(tmp_path / "another"))
