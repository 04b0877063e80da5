# guest: pair
# needs: weft mpich
# seconds: 120
# MPICH with one rank in each of two guests, on weft's RDM endpoints. Its launcher prints the command of
# each host (`-launcher manual`), which the host then runs.
a() {
	mpi_env
	mpiexec -launcher manual -hosts "$(rxe_addr4),$(peer_addr4)" -n 2 -ppn 1 python3 -m mpi4py "$WEFT_VM/programs/mpi.py" >/tmp/out 2>&1 &
	launcher=$!
	tries=0
	while ! grep -q '^HYDRA_LAUNCH_END' /tmp/out && [ $tries -lt 300 ]; do
		tries=$((tries + 1))
		sleep 0.1
	done
	sed -n 's/^HYDRA_LAUNCH: *//p' /tmp/out >/tmp/commands
	[ "$(wc -l </tmp/commands)" = 2 ] || { cat /tmp/out; return 1; }
	sed -n 2p /tmp/commands >/xchg/signal-mpi-command
	signal mpi-started
	sh -c "$(sed -n 1p /tmp/commands)" &
	wait $launcher
	status=$?
	[ $status = 0 ] || cat /tmp/out
	grep -E '^libfabric provider: |^mpi: ' /tmp/out
	[ $status = 0 ] && grep -q '^libfabric provider: weft - ' /tmp/out && grep -q '^mpi: ok, 2 ranks on 2 hosts' /tmp/out
}
b() {
	mpi_env
	await mpi-started 60 && sh -c "$(cat /xchg/signal-mpi-command)"
}
