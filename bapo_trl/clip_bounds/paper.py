"""The paper that the method is from."""

import textwrap


PAPER = {
    "title": "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with "
    "Adaptive Clipping",
    "id": "2510.18927",
    # docstyle-ignore
    "citation": textwrap.dedent("""\
        @article{xi2025bapo,
            title        = {{BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy
                            Optimization with Adaptive Clipping}},
            author       = {Zhiheng Xi and Xin Guo and Yang Nan and Enyu Zhou and Junrui Shen and Wenxiang Chen and
                            Jiaqi Liu and Jixuan Huang and Zhihao Zhang and Honglin Guo and Xun Deng and Zhikai Lei
                            and Miao Zheng and Guoteng Wang and Shuo Zhang and Peng Sun and Rui Zheng and Hang Yan
                            and Tao Gui and Qi Zhang and Xuanjing Huang},
            year         = 2025,
            eprint       = {arXiv:2510.18927},
        }"""),
}
"""The paper, as TRL's model cards cite it."""
