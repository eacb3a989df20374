"""RUN, hull 1: training that survives the loss of its ranks and says when it cannot."""
