"""Jobs with several losses and optimizers: a function of the person's makes the updates of a
step.
"""
