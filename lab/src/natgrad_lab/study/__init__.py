"""`natgrad study`: is a method worth it at large batch? (Ma et al. 2019, as a tool.)"""
