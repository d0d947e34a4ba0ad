"""The server's generative model: a latent diffusion model over clients' parameters,
trained through DeepSpeed.
"""
