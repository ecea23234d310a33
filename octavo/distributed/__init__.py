"""Several hosts that serve one model: how they find each other, agree, and notice that one is gone."""
