"""The engines in torch: the modules of model/, called as they are.

engines: builds those of all stages. slots: the KV cache of thinker and talker. thinker, code2wav:
their calls.
"""
