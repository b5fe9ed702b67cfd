// SPDX-License-Identifier: Apache-2.0

package patchbay

import (
	"context"
	"crypto/rand"
	"iter"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "patchbay.example/go/v1"
)

// Guest is a guest by name. The clients inside reach every method and every field; the name of the
// guest must be put into their requests.
type Guest struct {
	Name        string
	Guests      pb.GuestServiceClient
	Keys        pb.StaticKeysServiceClient
	Tracepoints pb.TracepointsServiceClient
}

// Options of a change.
type Options struct {
	// Reason is kept with the holds and in the audit log.
	Reason string
	// TTL gives the references back by itself; 0 means never.
	TTL time.Duration
	// RetryTimeout bounds the attempts while the guest is busy; 0 means nearly the deadline.
	RetryTimeout time.Duration
	AllowGuarded bool
	Force        bool
	ValidateOnly bool
	// RequestID makes a repeat get the first answer; a random one is used if it is empty.
	RequestID string
}

func duration(time time.Duration) *durationpb.Duration {
	if time == 0 {
		return nil
	}
	return durationpb.New(time)
}

func requestID(given string) string {
	if given != "" {
		return given
	}
	return rand.Text()
}

// Changes makes an op on keys, for Update and Prepare. If one of the keys is a glob, or begins with
// "!", all are patterns of one selection. Otherwise each is a key's name.
func Changes(op pb.KeyOp, keys ...string) []*pb.KeyUpdate {
	var updates []*pb.KeyUpdate
	for _, key := range keys {
		if strings.ContainsAny(key, "*?[") || strings.HasPrefix(key, "!") {
			return []*pb.KeyUpdate{{Op: op, Patterns: keys}}
		}
		updates = append(updates, &pb.KeyUpdate{Op: op, Name: key})
	}
	return updates
}

// Describe describes the guest, its kernel and its registration.
func (g *Guest) Describe(ctx context.Context) (*pb.DescribeGuestResponse, error) {
	return g.Guests.DescribeGuest(ctx, &pb.DescribeGuestRequest{Guest: g.Name})
}

// Watch sends the guest's status at once and after each change.
func (g *Guest) Watch(ctx context.Context) iter.Seq2[*pb.WatchGuestResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.WatchGuestResponse], error) {
		return g.Guests.WatchGuest(ctx, &pb.WatchGuestRequest{Guest: g.Name})
	})
}

// List lists the keys, ordered by name; patterns are globs.
func (g *Guest) List(ctx context.Context, patterns ...string) iter.Seq2[*pb.StaticKey, error] {
	return pages(func(token string) ([]*pb.StaticKey, string, error) {
		request := pb.ListStaticKeysRequest{Guest: g.Name, Patterns: patterns, PageToken: token}
		answer, err := g.Keys.ListStaticKeys(ctx, &request)
		return answer.GetKeys(), answer.GetNextPageToken(), err
	})
}

// Get returns one key with its first thousand sites.
func (g *Guest) Get(ctx context.Context, name string) (*pb.StaticKey, error) {
	answer, err := g.Keys.GetStaticKey(ctx, &pb.GetStaticKeyRequest{Guest: g.Name, Name: name})
	return answer.GetKey(), err
}

// Update changes keys in one transaction: all or nothing.
func (g *Guest) Update(ctx context.Context, updates []*pb.KeyUpdate, options Options) (*pb.UpdateStaticKeysResponse, error) {
	answer, err := g.Keys.UpdateStaticKeys(ctx, &pb.UpdateStaticKeysRequest{
		Guest:        g.Name,
		Updates:      updates,
		RequestId:    requestID(options.RequestID),
		ValidateOnly: options.ValidateOnly,
		AllowGuarded: options.AllowGuarded,
		Force:        options.Force,
		Reason:       options.Reason,
		Ttl:          duration(options.TTL),
		RetryTimeout: duration(options.RetryTimeout),
	})
	if err != nil {
		return nil, err
	}
	return answer, g.rest(ctx, &answer.Results, &answer.NextPageToken)
}

// rest fetches the pages of results that did not fit into an answer.
func (g *Guest) rest(ctx context.Context, results *[]*pb.KeyResult, token *string) error {
	var budget budget
	for *token != "" {
		request := pb.ListUpdateResultsRequest{Guest: g.Name, PageToken: *token}
		page, err := g.Keys.ListUpdateResults(ctx, &request)
		if err != nil {
			return err
		}
		if err := budget.spend(sizeOf(page.GetResults()), *token, page.GetNextPageToken()); err != nil {
			return wrap(err)
		}
		*results = append(*results, page.GetResults()...)
		*token = page.GetNextPageToken()
	}
	return nil
}

// Enable is static_branch_enable() on each key.
func (g *Guest) Enable(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_ENABLE, keys...), Options{})
}

// Disable is static_branch_disable() on each key.
func (g *Guest) Disable(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_DISABLE, keys...), Options{})
}

// Inc is static_branch_inc() on each key. The reference is this client's hold.
func (g *Guest) Inc(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_INC, keys...), Options{})
}

// Dec is static_branch_dec() on each key: drops a reference that this client holds.
func (g *Guest) Dec(ctx context.Context, keys ...string) (*pb.UpdateStaticKeysResponse, error) {
	return g.Update(ctx, Changes(pb.KeyOp_KEY_OP_DEC, keys...), Options{})
}

// Prepare resolves, plans and checks a change, and keeps the plan. The guest is not changed.
func (g *Guest) Prepare(ctx context.Context, updates []*pb.KeyUpdate, options Options) (*pb.PrepareUpdateResponse, error) {
	answer, err := g.Keys.PrepareUpdate(ctx, &pb.PrepareUpdateRequest{
		Guest:        g.Name,
		Updates:      updates,
		AllowGuarded: options.AllowGuarded,
		Force:        options.Force,
		Reason:       options.Reason,
		HoldTtl:      duration(options.TTL),
		RequestId:    requestID(options.RequestID),
	})
	if err != nil {
		return nil, err
	}
	return answer, g.rest(ctx, &answer.Results, &answer.NextPageToken)
}

// Commit writes a plan as it was prepared.
func (g *Guest) Commit(ctx context.Context, plan *pb.PrepareUpdateResponse) (*pb.CommitUpdateResponse, error) {
	answer, err := g.Keys.CommitUpdate(ctx, &pb.CommitUpdateRequest{
		Guest: g.Name, PlanId: plan.GetPlanId(), Digest: plan.GetDigest(),
	})
	if err != nil {
		return nil, err
	}
	return answer, g.rest(ctx, &answer.Results, &answer.NextPageToken)
}

// WatchKeys sends every change from a revision of an incarnation on; with "" and 0, from now on. The
// first response comes at once and has no events.
func (g *Guest) WatchKeys(ctx context.Context, incarnation string, start uint64, patterns ...string) iter.Seq2[*pb.WatchStaticKeysResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.WatchStaticKeysResponse], error) {
		return g.Keys.WatchStaticKeys(ctx, &pb.WatchStaticKeysRequest{
			Guest: g.Name, Incarnation: incarnation, StartRevision: start, Patterns: patterns,
		})
	})
}

// Holds lists the holds, ordered by key and age.
func (g *Guest) Holds(ctx context.Context, patterns ...string) iter.Seq2[*pb.Hold, error] {
	return pages(func(token string) ([]*pb.Hold, string, error) {
		request := pb.ListHoldsRequest{Guest: g.Name, Patterns: patterns, PageToken: token}
		answer, err := g.Keys.ListHolds(ctx, &request)
		return answer.GetHolds(), answer.GetNextPageToken(), err
	})
}

// Release gives back the references of holds, in one transaction.
func (g *Guest) Release(ctx context.Context, ids ...string) (*pb.ReleaseHoldsResponse, error) {
	return g.Keys.ReleaseHolds(ctx, &pb.ReleaseHoldsRequest{
		Guest: g.Name, Ids: ids, RequestId: requestID(""),
	})
}

// Renew gives holds a new expiry; with 0 they do not expire any more.
func (g *Guest) Renew(ctx context.Context, ttl time.Duration, ids ...string) ([]*pb.Hold, error) {
	request := pb.RenewHoldsRequest{Guest: g.Name, Ids: ids, Ttl: duration(ttl)}
	answer, err := g.Keys.RenewHolds(ctx, &request)
	return answer.GetHolds(), err
}

// Arm attaches probes, and parks: the guest traces nothing yet.
func (g *Guest) Arm(ctx context.Context, patterns ...string) (*pb.ArmTracepointsResponse, error) {
	return g.Tracepoints.ArmTracepoints(ctx, &pb.ArmTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Fire turns the keys of armed events on, all in one pause.
func (g *Guest) Fire(ctx context.Context, patterns ...string) (*pb.FireTracepointsResponse, error) {
	return g.Tracepoints.FireTracepoints(ctx, &pb.FireTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Park turns the keys off, all in one pause, except of events that others fired.
func (g *Guest) Park(ctx context.Context, patterns ...string) (*pb.ParkTracepointsResponse, error) {
	return g.Tracepoints.ParkTracepoints(ctx, &pb.ParkTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Disarm detaches the probes.
func (g *Guest) Disarm(ctx context.Context, patterns ...string) (*pb.DisarmTracepointsResponse, error) {
	return g.Tracepoints.DisarmTracepoints(ctx, &pb.DisarmTracepointsRequest{
		Guest: g.Name, Patterns: patterns, RequestId: requestID(""),
	})
}

// Trace arms and fires events for as long as the loop over it lasts, and sends them. The first
// response comes once they fire, and has their names.
func (g *Guest) Trace(ctx context.Context, patterns ...string) iter.Seq2[*pb.StreamTracepointEventsResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.StreamTracepointEventsResponse], error) {
		return g.Tracepoints.StreamTracepointEvents(ctx, &pb.StreamTracepointEventsRequest{
			Guest: g.Name, Patterns: patterns, ArmAndFire: true,
		})
	})
}

// KernelLog sends the log of the guest's kernel from now on, from its memory or as the agent reads it. The
// first response has no records.
func (g *Guest) KernelLog(ctx context.Context) iter.Seq2[*pb.StreamKernelLogResponse, error] {
	return stream(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[pb.StreamKernelLogResponse], error) {
		return g.Tracepoints.StreamKernelLog(ctx, &pb.StreamKernelLogRequest{Guest: g.Name})
	})
}
