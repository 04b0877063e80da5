# guest: pair
# later: it runs nothing of weft
# Two guests on one virtual cable: rdma-core's own program between them.
b() {
	index=$(cd /sys/class/infiniband/rxe0/ports/1/gids && grep -l 0000:0000:0000:0000:0000:ffff:0a4e:0002 * | head -1)
	ibv_rc_pingpong -d rxe0 -g "$index" -n 50 &
	await_port 18515 && signal listening && wait $!
}
a() {
	index=$(cd /sys/class/infiniband/rxe0/ports/1/gids && grep -l 0000:0000:0000:0000:0000:ffff:0a4e:0001 * | head -1)
	await listening 40 && ibv_rc_pingpong -d rxe0 -g "$index" -n 50 "$(peer_addr4)"
}
