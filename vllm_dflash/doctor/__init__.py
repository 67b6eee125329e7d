"""`vllm-dflash doctor`: does this drafter work with this target, and if not, why?

    settings.py      config.json against the target, before anything is loaded
    tokens.py        the drafter's own tokenizer and mask token against the target's tokenizer
    checkpoint.py    tensors: format, NaN, constants, what looks like an initialisation, quantisation damage
    subject.py       the drafter under examination, and how it runs as it is served
    probe.py         the target's greedy answers to a few prompts, with the outputs of all its layers, made once
    replay.py        what the drafter, run in a given way, would have drafted there: tau by the walk, and a score
    hypotheses.py    ways to run it that each repair one known mistake
    diagnosis.py     controls, repairs, and the one cause that explains most
    report.py        what is printed and written

Nothing here imports vLLM.
"""
