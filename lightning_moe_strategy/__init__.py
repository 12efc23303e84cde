"""FSDP x CP x EP for mixture-of-experts models, as the Lightning strategy ``"fsdp_cp_ep"``.

Importing this package imports neither torch nor lightning: public names load on first use.
"""
