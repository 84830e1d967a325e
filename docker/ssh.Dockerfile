# The same image with an SSH server, for machines one reaches by SSH only (rented GPUs, editors that open folders remotely).
#
#   docker build -f docker/ssh.Dockerfile -t minizero:ssh docker            # IMAGE=minizero:cpu for the CPU image
#   docker run -d --gpus all --shm-size=8g -p 127.0.0.1:2222:2222 -e SSH_PUBLIC_KEY="$(cat ~/.ssh/id_ed25519.pub)" minizero:ssh
#   ssh -p 2222 learner@127.0.0.1
ARG IMAGE=minizero:cuda
FROM ${IMAGE}

# Host keys that came with the package would be everybody's: start-ssh makes a container its own.
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
COPY --chmod=755 start-ssh.sh /usr/local/bin/start-ssh
USER 1000
EXPOSE 2222
CMD ["start-ssh"]
